"""Where tasks come from: the split rule, generated sources, mixtures.

Owns: which split a problem belongs to, and how (source, seed, difficulty, split, index) becomes one Task.

Invariant: a task is a pure function of those five; two splits never share a problem statement. The statement is what
the problem says and the files it comes with, without the effort, so one problem is on one side at every effort.
Refuses: Python's `hash`, global random state, and sources so small that a split is empty.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any, Literal, get_args

from nonet.protocols import TaskSource
from nonet.types import EFFORTS, Message, SandboxRecipe, Task, UserError

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT_SHARE = 5  # one problem in five
DRAWS = 2000  # candidates tried before a split counts as empty
DIFFICULTIES = (1, 2, 3)


def number(*parts: object) -> int:
    """A 64-bit number that depends on `parts` alone; the seed of everything random here."""
    return int.from_bytes(blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def split_of(statement: str) -> Split:
    """The split a problem statement belongs to, for every source and seed alike.

    >>> split_of("add 47 385")
    'train'
    """
    return "heldout" if number(statement) % HELD_OUT_SHARE == 0 else "train"


def statement_of(prompt: Sequence[Message], files: Mapping[str, str] | None = None) -> str:
    """The canonical statement of a problem: its messages' texts and its files."""
    said = "\n".join(message.text.strip() for message in prompt)
    return said if not files else f"{said}\n{json.dumps(files, sort_keys=True)}"


def check(split: str, index: int, effort: str) -> None:
    """UserError unless these can name a task."""
    if split not in SPLITS:
        raise UserError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    if index < 0:
        raise UserError(f"task index {index}: must not be negative")
    if effort not in EFFORTS:
        raise UserError(f"effort {effort!r}: must be one of {', '.join(EFFORTS)}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A drawn problem. `statement` replaces the prompt's text in the split rule where two prompts ask the same."""

    prompt: str
    data: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    statement: str = ""


class Generated(ABC):
    """A source that draws problems from random numbers. Subclasses write `draw` and `demonstrate`.

    `difficulty` 1 suits a model of a million parameters; 2 and 3 lengthen the work.
    """

    name: str
    domain: str
    about: str
    rewards: tuple[str, ...] = ("exact",)
    tools: tuple[str, ...] = ()

    def __init__(self, seed: int = 0, difficulty: int = 1):
        if difficulty not in DIFFICULTIES:
            raise UserError(f"difficulty {difficulty!r} for {self.name}: must be 1, 2 or 3")
        self.seed = seed
        self.difficulty = difficulty

    @abstractmethod
    def draw(self, rng: Random) -> Problem:
        """One problem; every random choice comes from `rng`."""

    @abstractmethod
    def demonstrate(self, task: Task) -> list[Message] | None:
        """Assistant turns of a correct solution."""

    def task(self, split: Split, index: int, effort: str = "max") -> Task:
        """Task number `index` of a split: the first candidate of its random stream that the split rule puts there."""
        check(split, index, effort)
        seed = number(self.name, self.seed, self.difficulty, split, index)
        rng = Random(seed)
        for _ in range(DRAWS):
            problem = self.draw(rng)
            prompt = (Message.user(problem.prompt),)
            if split_of(problem.statement or statement_of(prompt, problem.files)) == split:
                return self._task(problem, prompt, f"{self.name}/{split}/{index}", effort, seed)
        raise UserError(f"tasks {self.name}: no {split} problem among {DRAWS} draws; the source is too small to split")

    def _task(self, problem: Problem, prompt: tuple[Message, ...], id: str, effort: str, seed: int) -> Task:
        recipe = SandboxRecipe(problem.files, self.tools) if self.tools else None
        return Task(id, prompt, self.domain, effort, self.rewards, recipe, seed, problem.data)


class Mixture:
    """Several sources taking turns: index i is task i // n of source i % n, under that source's own id."""

    def __init__(self, name: str, sources: Sequence[TaskSource]):
        if not sources:
            raise UserError(f"tasks {name!r}: names no source")
        self.name = name
        self.sources = tuple(sources)
        names = [member.name for member in self.members()]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise UserError(f"tasks {name!r}: names {twice!r} twice")
        domains = {source.domain for source in sources}
        self.domain = domains.pop() if len(domains) == 1 else "mixed"

    def task(self, split: Split, index: int, effort: str = "max") -> Task:
        check(split, index, effort)
        inner, which = divmod(index, len(self.sources))
        return self.sources[which].task(split, inner, effort)

    def demonstrate(self, task: Task) -> list[Message] | None:
        for source in self.members():
            if task.id.startswith(f"{source.name}/"):
                return source.demonstrate(task)
        raise UserError(f"task {task.id}: comes from none of {', '.join(source.name for source in self.members())}")

    def members(self) -> Iterator[TaskSource]:
        """The sources themselves, those of inner mixtures included."""
        for source in self.sources:
            if isinstance(source, Mixture):
                yield from source.members()
            else:
                yield source


class Tagged:
    """A source whose tasks carry the name of another domain."""

    def __init__(self, source: TaskSource, domain: str):
        self.source, self.name, self.domain = source, source.name, domain

    def task(self, split: Split, index: int, effort: str = "max") -> Task:
        return replace(self.source.task(split, index, effort), domain=self.domain)

    def demonstrate(self, task: Task) -> list[Message] | None:
        return self.source.demonstrate(task)


def tagged(source: TaskSource, domain: str) -> TaskSource:
    """The same tasks, of a domain by this name."""
    if isinstance(source, Mixture):
        return Mixture(source.name, [tagged(s, domain) for s in source.sources])
    return source if source.domain == domain else Tagged(source, domain)
