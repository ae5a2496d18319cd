"""Sources made of tasks that somebody wrote down: lines of a JSONL file, dicts, or Task objects.

Owns: what a written-down task may say (`task_from`), its checks, and how a finite list answers any index.

Invariant: a problem statement is in one split only; index n of a split with m tasks is task n % m, on its
n // m-th repetition ("my_tasks/train/q7", then "my_tasks/train/q7@1"). Every mistake is one sentence that starts with
where it was found. Refuses: unknown fields, and a file errand that is solved before it starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nonet.sandbox import LocalSandbox
from nonet.tasks.rewards import REWARDS
from nonet.tasks.source import SPLITS, Split, check, split_of, statement_of
from nonet.types import EFFORTS, Message, SandboxRecipe, Task, Text, UserError

FILE_TOOLS = ("list_files", "read_file", "write_file")  # of a task with files that names no tools
FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,), "messages": (list,), "id": (str, int), "answer": (str, int, float), "files": (dict,),
    "expect_files": (dict,), "absent": (list,), "tests": (list,), "function": (str,), "domain": (str,),
    "effort": (str,), "reward": (str, list), "tools": (list,), "split": (str,), "demonstration": (str,),
    "data": (dict,),
}  # fmt: skip
NEEDS = {"exact": "answer", "files": "expect_files", "python_tests": "tests"}  # what a reward named by hand relies on
NAMES = {str: "text", list: "a list", dict: "an object", int: "a number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A written-down task with its place. `pinned` is the effort it insists on, if any."""

    where: str
    task: Task
    split: Split
    pinned: str | None = None


@dataclass(slots=True)
class FixedSource:
    """A TaskSource over a list of entries."""

    name: str
    entries: Iterable[Entry]
    domain: str = field(init=False)
    _by_split: dict[str, list[Entry]] = field(init=False)

    def __post_init__(self) -> None:
        entries = list(self.entries)
        if not entries:
            raise UserError(f"tasks {self.name}: holds no task")
        self._by_split = {split: [e for e in entries if e.split == split] for split in SPLITS}
        domains = {e.task.domain for e in entries}
        self.domain = domains.pop() if len(domains) == 1 else "mixed"
        _no_twins(entries)

    def task(self, split: Split, index: int, effort: str = "max") -> Task:
        check(split, index, effort)
        entries = self._by_split[split]
        if not entries:
            count = sum(map(len, self._by_split.values()))
            raise UserError(f'tasks {self.name}: none of its {count} is {split}; mark one with "split": "{split}"')
        again, which = divmod(index, len(entries))
        entry = entries[which]
        id = f"{self.name}/{split}/{entry.task.id}" + (f"@{again}" if again else "")
        return replace(entry.task, id=id, effort=entry.pinned or effort)

    def demonstrate(self, task: Task) -> list[Message] | None:
        text = task.data.get("demonstration")
        return [Message.assistant(text)] if text else None


def _no_twins(entries: list[Entry]) -> None:
    ids: dict[str, Entry] = {}
    statements: dict[str, Entry] = {}
    for entry in entries:
        twin = ids.setdefault(entry.task.id, entry)
        if twin is not entry:
            raise UserError(f"{entry.where}: id {entry.task.id!r} is taken by {twin.where}; give each task its own")
        twin = statements.setdefault(_statement(entry.task), entry)
        if twin.split != entry.split:
            raise UserError(
                f"{entry.where}: split: the same problem is in {twin.split} at {twin.where}; keep one of them"
            )


def _statement(task: Task) -> str:
    return statement_of(task.prompt, task.sandbox.files if task.sandbox else None)


def entry_of(item: Task | Mapping[str, Any], where: str, default_id: str) -> Entry:
    """An Entry from a Task, or from a dict with the fields of a JSONL line (docs/tasks.md describes them)."""
    if isinstance(item, Task):
        return Entry(where, item, split_of(_statement(item)))
    if not isinstance(item, Mapping):
        raise UserError(f'{where}: must be an object such as {{"prompt": "...", "answer": "..."}}')
    _check_fields(item, where)
    task = _task(item, where, default_id)
    split = _choice(item, "split", SPLITS, where) or split_of(_statement(task))
    _check_errand(task, where)
    return Entry(where, task, split, _choice(item, "effort", EFFORTS, where))


def _check_fields(item: Mapping[str, Any], where: str) -> None:
    for key, value in item.items():
        if key not in FIELDS:
            near = difflib.get_close_matches(str(key), FIELDS, n=1, cutoff=0.0)[0]
            raise UserError(f"{where}: {key}: unknown field; did you mean {near}?")
        if not isinstance(value, FIELDS[key]) or isinstance(value, bool):
            wanted = " or ".join(dict.fromkeys(NAMES[kind] for kind in FIELDS[key]))
            raise UserError(f"{where}: {key} = {value!r}: must be {wanted}")
    for key, needs in NEEDS.items():
        if key in _named(item) and not any(field in item for field in (needs, "data")):
            raise UserError(f"{where}: reward {key!r} needs {needs}; add it, or leave reward out")
    if "tests" in item and not item["tests"]:
        raise UserError(f"{where}: tests: holds no test; add [arguments, expected]")
    if "answer" in item and not str(item["answer"]).strip():
        raise UserError(f"{where}: answer: is empty, so saying nothing would succeed; leave it out or fill it in")
    if ("prompt" in item) == ("messages" in item):
        raise UserError(f"{where}: give either prompt (text) or messages (a list of role and content)")


def _choice(item: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> Any:
    if key in item and item[key] not in allowed:
        raise UserError(f"{where}: {key} = {item[key]!r}: must be one of {', '.join(allowed)}")
    return item.get(key)


def _task(item: Mapping[str, Any], where: str, default_id: str) -> Task:
    prompt = (Message.user(item["prompt"]),) if "prompt" in item else _messages(item["messages"], where)
    data = {**item.get("data", {}), **{k: item[k] for k in ("answer", "demonstration", "function") if k in item}}
    if "expect_files" in item or "absent" in item:
        data |= {"files": _texts(item, "expect_files", where), "absent": item.get("absent", [])}
    if "tests" in item:
        tests = [_test(test, f"{where}: tests[{i}]") for i, test in enumerate(item["tests"])]
        data |= {"inputs": [args for args, _ in tests], "expected": [wanted for _, wanted in tests]}
    return Task(
        id=str(item.get("id", default_id)),
        prompt=prompt,
        domain=item.get("domain", "general"),
        rewards=_rewards(item, where),
        sandbox=_recipe(item, where),
        data=data,
    )


def _messages(items: list[Any], where: str) -> tuple[Message, ...]:
    out: list[Message] = []
    for i, item in enumerate(items):
        role = item.get("role") if isinstance(item, dict) else None
        content = item.get("content") if isinstance(item, dict) else None
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise UserError(f'{where}: messages[{i}]: write {{"role": system, user or assistant, "content": text}}')
        out.append(Message(role, (Text(content),)))
    if not out or out[-1].role != "user":
        raise UserError(f"{where}: messages: the last one must be the user's")
    return tuple(out)


def _test(test: Any, where: str) -> tuple[list[Any], Any]:
    if isinstance(test, list) and len(test) == 2 and isinstance(test[0], list):
        return test[0], test[1]
    raise UserError(f"{where} = {test!r}: write [arguments, expected], such as [[2, 3], 5]")


def _texts(item: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    for path, text in item.get(key, {}).items():
        if not isinstance(text, str):
            raise UserError(f"{where}: {key}.{path} = {text!r}: must be text")
    return dict(item.get(key, {}))


def _named(item: Mapping[str, Any]) -> list[Any]:
    reward = item.get("reward", [])
    return [reward] if isinstance(reward, str) else reward


def _rewards(item: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Those named, else what the fields given allow. None at all is fine: `--reward` may supply one."""
    if "reward" in item:
        names = _named(item)
        for name in names:
            if not isinstance(name, str) or (":" not in name and name not in REWARDS):
                known = ", ".join(REWARDS)
                raise UserError(f"{where}: reward {name!r}: must be one of {known}, or pkg.module:function")
        return tuple(names)
    by_field = {"answer": "exact", "expect_files": "files", "absent": "files", "tests": "python_tests"}
    return tuple(dict.fromkeys(reward for key, reward in by_field.items() if key in item))


def _recipe(item: Mapping[str, Any], where: str) -> SandboxRecipe | None:
    if not any(key in item for key in ("files", "tools", "expect_files", "absent")):
        return None
    recipe = SandboxRecipe(_texts(item, "files", where), tuple(item.get("tools", FILE_TOOLS)))
    try:
        LocalSandbox(recipe).close()
    except UserError as e:
        raise UserError(f"{where}: {e}") from e
    return recipe


def _check_errand(task: Task, where: str) -> None:
    if "files" not in task.rewards or "files" not in task.data:
        return
    start = task.sandbox.files if task.sandbox else {}
    done = all(path in start and start[path].strip() == text.strip() for path, text in task.data["files"].items())
    if done and not any(path in start for path in task.data["absent"]):
        raise UserError(f"{where}: expect_files: already true of files, so doing nothing would succeed; change one")
