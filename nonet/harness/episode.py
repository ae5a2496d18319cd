"""One attempt at one task: renders what the policy sees, runs its tool calls, knows when the attempt is over.

An Episode can be rebuilt at any token from its Trajectory (`resume`), so parking needs nothing but the record: the
segments say what was said, the sandbox checkpoint says what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from nonet.chat import Tokenizer
from nonet.harness.spec import system_text
from nonet.harness.syntax import parse_assistant, render_assistant
from nonet.protocols import Sandbox
from nonet.types import HarnessSpec, Message, Segment, Task, Tool, ToolResult, Trajectory

OpenSandbox = Callable[[Task, Any], Sandbox | None]


class Episode:
    """Single use. `transcript` is the conversation so far; `stop_reason` is set when it has ended."""

    def __init__(self, task: Task, spec: HarnessSpec, tokenizer: Tokenizer, sandbox: Sandbox | None):
        self.task, self.spec, self.tokenizer, self.sandbox = task, spec, tokenizer, sandbox
        tools = sandbox.tools if sandbox is not None and task.sandbox and task.sandbox.tools else ()
        self.transcript = opening(task, spec, tools)
        self.turns = 0
        self.stop_reason = ""

    def prompt(self) -> list[int]:
        """Token ids of the conversation before the policy's first word."""
        return prompt_ids(self.transcript, self.tokenizer)

    def observe(self, turn: Sequence[int]) -> Segment | None:
        """Take the policy's finished turn (its end token included). Returns the tool segment that follows, or None at
        the end.
        """
        message, error = self._read(turn)
        if error is None and not message.calls:
            self.stop_reason = "stop"
        elif self.turns >= self.spec.max_turns:
            self.stop_reason = "turns"
        if self.stop_reason:
            return None
        results = [ToolResult(error, True)] if error else [self._call(c) for c in message.calls]
        self._add_results(r.text for r in results)
        tokens = self.tokenizer.continuation([{"role": self.spec.tool_role, "content": r.text} for r in results])
        return Segment("tool", tuple(tokens), texts=tuple(r.text for r in results))

    def _call(self, call: Any) -> ToolResult:
        if self.sandbox is None:
            return ToolResult("this task has no tools", True)
        return self.sandbox.call(call)

    def _read(self, turn: Sequence[int]) -> tuple[Message, str | None]:
        stops = self.tokenizer.stop_ids
        ids = turn[:-1] if turn and turn[-1] in stops else turn
        message, error = parse_assistant(self.tokenizer.decode(ids), self.spec)
        self.transcript.append(message)
        self.turns += 1
        return message, error

    def _add_results(self, texts: Any) -> None:
        self.transcript += [Message("tool", (ToolResult(t),)) for t in texts]

    def close_unfinished(self, turn: Sequence[int], reason: str) -> None:
        """End on words cut short (token budget): they enter the transcript, their calls are not run."""
        self._read(turn)
        self.stop_reason = reason

    @staticmethod
    def resume(
        task: Task, spec: HarnessSpec, tokenizer: Tokenizer, trajectory: Trajectory, open_sandbox: OpenSandbox
    ) -> Episode:
        """The episode as it stood at the trajectory's last token; a turn still being written is left to its writer."""
        episode = Episode(task, spec, tokenizer, open_sandbox(task, trajectory.sandbox))
        turn: list[int] = []
        for author, run in groupby(trajectory.segments, key=lambda s: s.author):
            segments = list(run)
            if author == "policy":
                turn = [t for s in segments for t in s.tokens]
            elif author == "tool":
                episode._read(turn)
                episode._add_results(t for s in segments for t in s.texts)
        return episode


def opening(task: Task, spec: HarnessSpec, tools: Sequence[Tool]) -> list[Message]:
    """What is said before the policy's first word: the system message, where there is one, and the task's prompt."""
    system = system_text(spec, task.effort, tools)
    return [*([Message.system(system)] if system else []), *task.prompt]


def prompt_ids(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    return tokenizer.prompt([{"role": m.role, "content": m.text} for m in messages])


def demonstration(
    task: Task, turns: Sequence[Message], spec: HarnessSpec, tokenizer: Tokenizer, sandbox: Sandbox | None
) -> tuple[list[int], list[bool], Episode]:
    """Token ids of a worked solution exactly as a rollout would see them, with True on what the policy must learn to
    write.

    Tool results come from really running the calls. Raises ValueError if the episode ends before the turns do.
    """
    episode = Episode(task, spec, tokenizer, sandbox)
    ids = episode.prompt()
    mask = [False] * len(ids)
    for i, message in enumerate(turns):
        written = [*tokenizer.encode(render_assistant(message, spec)), tokenizer.turn_end]
        ids += written
        mask += [True] * len(written)
        result = episode.observe(written)
        if (result is None) != (i == len(turns) - 1):
            raise ValueError(
                f"demonstration of {task.id}: episode {'ended early' if result is None else 'goes on'} at turn {i}"
            )
        if result is not None:
            ids += result.tokens
            mask += [False] * len(result.tokens)
    return ids, mask, episode
