"""The protocols rooms meet through: Generator, Sandbox, Reward, TaskSource. Nouns are in types.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from nonet.types import Completion, Message, Request, Task, Tool, ToolCall, ToolResult


class Generator(Protocol):
    """Something that turns Requests into Completions: the engine, or a fake in a test.

    context: positions one request may fill, its tokens and max_tokens together. A request that cannot be served is
    refused by `submit` with a UserError; one that was accepted ends in exactly one Completion, out of `step` (stop,
    length), `pause` (paused) or `abort` (aborted).
    """

    version: int
    context: int

    def submit(self, request: Request) -> None: ...
    def step(self) -> list[Completion]: ...
    def pause(self) -> list[Completion]: ...
    def abort(self, request_id: str) -> Completion | None:
        """End a request wherever it is; None if there is none of this id."""
        ...

    def written(self, request_id: str, since: int = 0) -> Completion | None:
        """What an unfinished request wrote from its `since`-th token on, as a Completion with finish_reason "running";
        None if there is none of this id.
        """
        ...

    @property
    def busy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of running a program: exit status (negative: killed by that signal), and what it printed."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool = False


@runtime_checkable
class Sandbox(Protocol):
    """A place where tools act. `checkpoint` returns something JSON can carry; `restore` on the class undoes it."""

    tools: tuple[Tool, ...]

    def call(self, call: ToolCall) -> ToolResult: ...
    def files(self) -> dict[str, str]: ...
    def run_python(self, source: str, timeout_s: float = 2.0) -> RunResult: ...
    def checkpoint(self) -> Any: ...
    def close(self) -> None: ...


class Reward(Protocol):
    """Score of a finished attempt, usually in [0, 1]. `transcript` holds prompt, assistant and tool messages."""

    def __call__(self, task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float: ...


class TaskSource(Protocol):
    """A family of tasks. `task` is a pure function of its arguments; train and held-out splits are disjoint."""

    name: str
    domain: str

    def task(self, split: Literal["train", "heldout"], index: int, effort: str = "max") -> Task: ...

    def demonstrate(self, task: Task) -> list[Message] | None:
        """Assistant turns of a correct solution (tool results are filled in by really running the calls)."""
        ...
