"""The coding verifier: run the answer's function on hidden inputs in a child process, compare the results here.

Invariant: the child never holds an expected output, so nothing it does (printing PASS, exiting, patching json or
print, forging the result line, objects that equal everything) can be worth more than computing the right values.
Refuses: results that JSON cannot carry, and partial credit.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from nonet.protocols import Sandbox
from nonet.sandbox import run_python
from nonet.types import Message, Task, UserError

TIMEOUT_S = 1.0
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# Runs in the child. What it uses afterwards it binds before the answer gets to run.
CHILD = """
import json, os, sys
def main(code, name, inputs, mark, dumps=json.dumps, write=os.write, stdout=sys.stdout, leave=os._exit):
    names = {"__name__": "answer"}
    try:
        exec(compile(code, "answer.py", "exec"), names)
    except BaseException:
        leave(1)
    results = []
    for args in inputs:
        try:
            results.append(dumps([names[name](*args)]))
        except BaseException:
            results.append("")
    stdout.flush()
    write(1, ("\\n" + mark + dumps(results) + mark).encode())
main(*json.loads(%r))
"""


def code_of(text: str, function: str) -> str:
    """The first ```python block that defines the function, or the first block, or the whole text.

    >>> code_of("Here:\\n```python\\ndef f(x): return x\\n```", "f")
    'def f(x): return x\\n'
    """
    blocks: list[str] = BLOCK.findall(text)
    defining = [block for block in blocks if f"def {function}" in block]
    return (defining or blocks or [text.strip()])[0]


def python_tests(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """1 if the answer's function gives `data["expected"]` for every argument list of `data["inputs"]`, else 0."""
    expected = _needed(task, "expected")
    function = task.data.get("function", "f")
    text = next((m.text for m in reversed(transcript) if m.role == "assistant"), "")
    code = code_of(text, function)
    if function not in code:
        return 0.0
    results = _run(code, function, _needed(task, "inputs"), sandbox)
    return float(results is not None and same(results, [[value] for value in expected]))


def _needed(task: Task, key: str) -> Any:
    if not task.data.get(key):
        raise UserError(f"task {task.id}: reward 'python_tests' needs {key!r}, which the task does not give")
    return task.data[key]


def _run(code: str, function: str, inputs: Any, sandbox: Sandbox | None) -> list[Any] | None:
    """The results as one-element lists, or None if the child did not deliver them all."""
    mark = secrets.token_hex(8)
    program = CHILD % json.dumps([code, function, inputs, mark])
    run = (run_python if sandbox is None else sandbox.run_python)(program, timeout_s=TIMEOUT_S)
    parts = run.stdout.split(mark)
    if len(parts) < 3:
        return None
    try:
        return [json.loads(result) for result in json.loads(parts[-2])]
    except (ValueError, TypeError, RecursionError):
        return None


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values in which a truth value is not a number and a tuple is a list."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return {*map(str, a)} == {*map(str, b)} and all(same(a[key], b[key]) for key in a)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and a == b
