"""reasoning-gym's datasets as task sources, scored by their own scorers (extra: nonet[tasks]).

Owns: `gym:NAME?key=value&...`, the cache of datasets, and where a score is computed. The package is imported when the
first source is made (about 2 s), never with `nonet.tasks`.

Invariant: a task is a pure function of (name, settings, seed, split, index), and a score never raises, whatever the
answer. Scorers that evaluate the answer as Python (eval, sympy) run in a confined child process, not in ours.
Refuses: settings the dataset does not have, and datasets whose scorer gives nonsense full marks.
"""

from __future__ import annotations

import base64
import difflib
import importlib
import inspect
import json
import pickle
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from nonet.sandbox.python_runner import runner
from nonet.tasks.source import Split, check, number, split_of, statement_of
from nonet.types import Message, Task, UserError

DRAWS = 200  # candidates tried before a split counts as empty
INDICES = 1 << 31
ANSWER_LIMIT = 4000  # characters; a longer answer scores 0 unread
TIMEOUT_S = 3.0
NONSENSE = "qx9-zz"
SOLVED_LIMIT = 8
SHOWN_ANSWERS = (
    "example_correct_answer",
    "example_answer",
    "possible_answer",
)  # metadata, where many are right
COMPOSITE = "; write gym:A,gym:B to mix datasets"
EVALUATES = ("eval(", "parse_expr(", "exec(")

CHILD = """
import base64, json, os, pickle, reasoning_gym
def main(packed, mark, write=os.write, dumps=json.dumps):
    name, settings, entry, answer = pickle.loads(base64.b64decode(packed))
    value = reasoning_gym.create_dataset(name, **settings).score_answer(answer, entry)
    write(1, (mark + dumps(float(value)) + mark).encode())
main(%r, %r)
"""


def names() -> list[str]:
    """Every dataset of the installed package."""
    return sorted(_package().factory.DATASETS)


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as e:
        raise UserError(f"gym:...: install nonet[tasks] (no module {e.name!r})") from e


@dataclass(slots=True)
class GymSource:
    """One dataset. `settings` are fields of its configuration; `size` bounds those that are built as a whole."""

    name: str
    dataset: str
    settings: tuple[tuple[str, Any], ...]
    seed: int
    domain: str = "general"

    @staticmethod
    def parse(spec: str, seed: int = 0) -> GymSource:
        """From `gym:NAME` or `gym:NAME?key=value&...`; values are JSON, bare words are text."""
        dataset, _, query = spec.removeprefix("gym:").partition("?")
        settings = tuple(_setting(spec, part) for part in query.split("&") if part)
        own = number("gym", dataset, seed) % INDICES
        source = GymSource(spec, dataset, (("seed", own), *settings), seed)
        source.task("train", 0)  # a dataset that cannot be used says so now
        return source

    def task(self, split: Split, index: int, effort: str = "max") -> Task:
        check(split, index, effort)
        loaded = load_dataset(self.dataset, json.dumps(dict(self.settings)))
        solved = 0  # problems that nonsense would solve: a scorer's fault, or a puzzle that starts out solved
        for k in range(DRAWS):
            seed = number(self.name, self.seed, split, index, k)
            entry = _entry(loaded, seed % INDICES)
            prompt = (Message.user(entry["question"]),)
            if split_of(statement_of(prompt)) != split:
                continue
            data = {"dataset": self.dataset, "settings": dict(self.settings), "entry": entry}
            task = Task(f"{self.name}/{split}/{index}", prompt, self.domain, effort, ("gym",), None, seed, data)
            if score(task, NONSENSE) < 1.0:
                return task
            solved += 1
            if solved == SOLVED_LIMIT:
                raise UserError(f"{self.name}: its scorer gives full marks to any text; use another dataset")
        raise UserError(f"tasks {self.name}: no {split} problem among {DRAWS} draws; give it a larger ?size=")

    def demonstrate(self, task: Task) -> list[Message] | None:
        """The entry's own answer, where the scorer gives it full marks; some datasets state none."""
        entry = task.data["entry"]
        for answer in (entry.get("answer"), *(entry["metadata"].get(key) for key in SHOWN_ANSWERS)):
            text = json.dumps(answer) if isinstance(answer, dict) else answer
            if isinstance(text, str) and score(task, text) >= 1.0:
                return [Message.assistant(text)]
        return None


def _setting(spec: str, part: str) -> tuple[str, Any]:
    key, equals, text = part.partition("=")
    if not equals:
        raise UserError(f"{spec}: {part}: write settings as ?key=value&key=value")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


@lru_cache(maxsize=64)
def load_dataset(dataset: str, settings_json: str) -> Any:
    """The dataset object of these settings; a UserError names what is wrong with them."""
    registry = _package().factory.DATASETS
    if dataset not in registry:
        near = difflib.get_close_matches(dataset, registry, n=1, cutoff=0.0)[0]
        raise UserError(f"gym:{dataset}: reasoning-gym has no such dataset; did you mean gym:{near}?")
    settings = json.loads(settings_json)
    known = [f.name for f in fields(registry[dataset][1])]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UserError(f"gym:{dataset}: {key}: unknown setting; did you mean {near}?")
    try:
        return _package().create_dataset(dataset, **settings)
    except ImportError as e:
        raise UserError(f"gym:{dataset}: needs the package {e.name}; install it") from e
    except (AssertionError, ValueError, TypeError) as e:
        raise UserError(f"gym:{dataset}: settings {settings}: {e}{COMPOSITE if dataset == 'composite' else ''}") from e


def _entry(loaded: Any, index: int) -> dict[str, Any]:
    """Datasets made entry by entry take any index; those built as a whole repeat after their size."""
    try:
        return loaded[index]
    except (IndexError, KeyError):
        return loaded[index % len(loaded)]


def score(task: Task, answer: str) -> float:
    """The dataset's own score of `answer` for the task's entry, clipped to [0, 1]; 0 where its scorer raises."""
    if not {"dataset", "settings", "entry"} <= set(task.data):
        raise UserError(f"task {task.id}: reward 'gym' scores tasks of gym: sources only")
    if not answer or len(answer) > ANSWER_LIMIT:
        return 0.0
    return _score(task.data["dataset"], task.data["settings"], task.data["entry"], answer)


def _score(dataset: str, settings: Mapping[str, Any], entry: dict[str, Any], answer: str) -> float:
    loaded = load_dataset(dataset, json.dumps(dict(settings)))
    try:
        confined = _evaluates(type(loaded))
        value = _confined(dataset, settings, entry, answer) if confined else loaded.score_answer(answer, entry)
        return min(1.0, max(0.0, float(value)))
    except Exception:  # scorers parse what a policy wrote; whatever they trip over is a wrong answer
        return 0.0


@lru_cache(maxsize=256)
def _evaluates(kind: type) -> bool:
    """Does this scorer run the answer as code? Judged by its source, so new datasets are caught too."""
    source = inspect.getsource(kind.score_answer)  # type: ignore[attr-defined]
    return any(word in source for word in EVALUATES)


def _confined(dataset: str, settings: Mapping[str, Any], entry: dict[str, Any], answer: str) -> float:
    mark = secrets.token_hex(8)
    packed = base64.b64encode(pickle.dumps((dataset, dict(settings), entry, answer))).decode("ascii")
    run = runner(("reasoning_gym",)).run(CHILD % (packed, mark), timeout_s=TIMEOUT_S)
    parts = run.stdout.split(mark)
    return float(parts[-2]) if len(parts) == 3 else 0.0
