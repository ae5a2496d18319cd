"""The verifiers: what counts as right, and that no transcript or cheat upsets them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nonet.sandbox import LocalSandbox
from nonet.tasks import REWARDS, load, load_reward
from nonet.tasks.python_tests import code_of, same
from nonet.tasks.rewards import exact, same_answer
from nonet.types import Message, Reasoning, SandboxRecipe, Task, Text, ToolCall, ToolResult, UserError

PROMPT = (Message.user("?"),)


def say(text: str) -> list[Message]:
    return [*PROMPT, Message.assistant(text)]


# -------------------------------------------------------------------- exact


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("4", "4", 1.0),
        ("4", "  4\n", 1.0),
        ("4", "4.0", 1.0),
        ("4", "+4", 1.0),
        ("0.5", "0.50", 1.0),
        ("4", "4 apples", 0.0),
        ("4", "14", 0.0),
        ("4", "", 0.0),
        ("4", "I think <answer> 4 </answer> is right", 1.0),
        ("4", "<answer>5</answer> no, <answer>4</answer>", 1.0),
        ("4", "4 <answer>5</answer>", 0.0),
        ("4", "<answer>4", 0.0),
        ("fig", "fig", 1.0),
        ("fig", "Fig", 0.0),
        ("nan", "nan", 1.0),
        ("1e3", "1000", 0.0),
        ("1_0", "10", 0.0),
        (4, "4", 1.0),
        ("9" * 50, "9" * 49 + "8", 0.0),
        ("", "", 0.0),
    ],
)
def test_exact(answer, text: str, score: float):
    assert exact(Task("t", PROMPT, data={"answer": answer}), say(text), None) == score


def test_exact_reads_the_last_assistant_message_and_not_its_reasoning():
    task = Task("t", PROMPT, data={"answer": "4"})
    assert exact(task, [*say("4"), Message.assistant("5")], None) == 0.0
    assert exact(task, [*say("5"), Message.assistant("4"), Message("tool", (ToolResult("5"),))], None) == 1.0
    assert exact(task, [*PROMPT, Message.assistant(reasoning="4")], None) == 0.0
    assert exact(task, [Message.user("4")], None) == 0.0


@given(st.text(), st.text())
def test_same_answer_is_equality_or_equal_numbers(a: str, b: str):
    assert same_answer(a, a)
    assert same_answer(a, b) == same_answer(b, a)


# -------------------------------------------------------------------- files


def test_files_compares_the_listed_files_and_the_absent_ones():
    task = Task("t", PROMPT, rewards=("files",), data={"files": {"a": "1"}, "absent": ["b"]})
    reward = load_reward("files")
    for files, score in (
        ({"a": "1"}, 1.0),
        ({"a": "1\n"}, 1.0),
        ({"a": "1", "extra": ""}, 1.0),
        ({"a": "2"}, 0.0),
        ({}, 0.0),
        ({"a": "1", "b": ""}, 0.0),
    ):
        with LocalSandbox(SandboxRecipe(files)) as box:
            assert reward(task, PROMPT, box) == score
    assert reward(task, PROMPT, None) == 0.0


# ------------------------------------------------------------- python_tests

DOUBLE = Task(
    "t", PROMPT, "coding", rewards=("python_tests",),
    data={"function": "f", "inputs": [[1], [5], [-2]], "expected": [2, 10, -4]},
)  # fmt: skip


def run(code: str, task: Task = DOUBLE) -> float:
    return load_reward("python_tests")(task, say(code), None)


@pytest.mark.parametrize(
    "code",
    [
        "def f(x): return 2*x",
        "f = lambda x: x + x",
        "Sure:\n```python\ndef f(x):\n    print('debug')\n    return x*2\n```\nUse it so:\n```python\nf(3)\n```",
        "```\ndef f(x): return x*2\n```",
        "import math\ndef g(x): return x*2\ndef f(x): return float(g(x))",
    ],
)
def test_a_right_function_passes_however_it_is_written(code: str):
    assert run(code) == 1.0


EQUAL_TO_ALL = "class E(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
CHEATS = {
    "nothing": "",
    "no function": "print('PASS')",
    "wrong": "def f(x): return x",
    "right once": "def f(x): return 2",
    "strings": "def f(x): return str(2*x)",
    "truth values": "def f(x): return True",
    "prints PASS": "def f(x): return x\nprint('PASS'); print('[2, 10, -4]')",
    "exits well": "import sys\ndef f(x): return x\nsys.exit(0)",
    "exits inside": "import sys\ndef f(x): sys.exit(0)",
    "exits hard": "import os\ndef f(x): os._exit(0)",
    "raises": "def f(x): raise ValueError",
    "never ends": "def f(x):\n  while True: pass",
    "equal to everything": EQUAL_TO_ALL + "def f(x): return E(7)",
    "equal object": "class E:\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "list equal to everything": "class E(list):\n  def __eq__(self, other): return True\ndef f(x): return E()",
    "patches json": "import json\njson.dumps = lambda *a, **k: '[2]'\njson.loads = None\ndef f(x): return x",
    "patches the encoder": "import json.encoder as e\ne.JSONEncoder.encode = lambda s, o: '[2]'\ndef f(x): return x",
    "patches print": "import builtins\nbuiltins.print = lambda *a: None\ndef f(x): return x",
    "patches write": "import os\nos.write = lambda *a: 0\ndef f(x): return x",
    "patches builtins": "import builtins\nbuiltins.all = lambda i: True\nbuiltins.map = None\ndef f(x): return x",
    "hunts for the answers": (
        "import gc\ndef f(x):\n  for o in gc.get_objects():\n"
        "    if type(o) is dict and 'expected' in o: return o['expected'][0]\n  return x"
    ),
    "reads the frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe(1)\n  return frame.f_locals.get('expected', [x])[0]"
    ),
    "forges the results": (
        "import sys, os\ndef f(x):\n  frame = sys._getframe(1)\n  mark = frame.f_locals['mark']\n"
        "  os.write(1, (mark + '[\"[1]\", \"[1]\", \"[1]\"]' + mark).encode())\n  os._exit(0)"
    ),
    "floods the output": "print('x' * 200000)\ndef f(x): return 2*x",
    "closes the output": "import os\nos.close(1)\ndef f(x): return 2*x",
    "nests deeply": "def f(x):\n  l = []\n  for _ in range(900): l = [l]\n  return l",
    "is no number": "def f(x): return float('nan')",
    "is endless": "def f(x): return 10**5000",
    "is a set": "def f(x): return {2*x}",
    "changes the input": "def f(x, seen=[]): seen.append(x); return len(seen)",
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_scores_nothing(cheat: str, monkeypatch):
    monkeypatch.setattr("nonet.tasks.python_tests.TIMEOUT_S", 0.5)
    assert run(CHEATS[cheat]) == 0.0


def test_it_runs_in_the_attempts_sandbox_when_there_is_one():
    with LocalSandbox(SandboxRecipe({"lib.py": "def twice(x): return 2*x"})) as box:
        code = "from lib import twice as f"
        assert load_reward("python_tests")(DOUBLE, say(code), box) == 1.0
    assert run("from lib import twice as f") == 0.0


def test_collections_compare_by_value_and_truth_values_are_no_numbers():
    assert same([1, [2.0, "a"], {"k": None}], (1, (2, "a"), {"k": None}))
    assert not same(1, True)
    assert not same([0], [False])
    assert not same("1", 1)
    assert not same([1, 2], [1])
    assert not same({"a": 1}, {"b": 1})


def test_the_block_that_defines_the_function_is_the_answer():
    text = "```python\nimport math\n```\nthen\n```py\ndef g(): pass\n```\n```python\ndef f(): pass\n```"
    assert code_of(text, "f") == "def f(): pass\n"
    assert code_of(text, "h") == "import math\n"
    assert code_of(" def f(): pass ", "f") == "def f(): pass"


# ------------------------------------------------------------ any transcript

parts = st.one_of(
    st.builds(Text, st.text(max_size=20) | st.sampled_from(["f", "def f(x): return", "```python\nf\n```", "<answer>"])),
    st.builds(Reasoning, st.text(max_size=5)),
    st.builds(ToolCall, st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.integers(), max_size=1)),
    st.builds(ToolResult, st.text(max_size=5), st.booleans()),
)
messages = st.builds(
    Message, st.sampled_from(["system", "user", "assistant", "tool"]), st.lists(parts, max_size=3).map(tuple)
)
TASKS = [load(name).task("train", 0) for name in ("general", "agents", "coding")]


@settings(max_examples=80, deadline=None)
@given(st.lists(messages, max_size=4), st.sampled_from(TASKS))
def test_no_transcript_upsets_a_verifier(transcript, task: Task):
    for box in (None, LocalSandbox(task.sandbox) if task.sandbox else None):
        for name in task.rewards:
            assert load_reward(name)(task, transcript, box) == 0.0
        if box is not None:
            box.close()


# ----------------------------------------------------------------- registry


def test_a_task_without_what_its_reward_needs_is_a_user_error():
    bare = Task("t", PROMPT)
    for name in REWARDS:
        with pytest.raises(UserError, match=f"task t: reward '{name}'"):
            REWARDS[name](bare, say("def f(x): return x"), None)


def test_load_reward_takes_names_and_functions():
    assert load_reward("exact") is exact
    assert load_reward("nonet.tasks.rewards:exact") is exact
    with pytest.raises(UserError, match="did you mean 'exact'"):
        load_reward("exakt")
    with pytest.raises(UserError, match="is not a function"):
        load_reward("nonet.types:EFFORTS")
