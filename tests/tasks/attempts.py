"""Shared by the task tests: play assistant turns in a real sandbox and score the outcome."""

from __future__ import annotations

from collections.abc import Sequence

from nonet.sandbox import LocalSandbox
from nonet.tasks import load_reward
from nonet.types import Message, Task, ToolResult


def play_turns(task: Task, turns: Sequence[Message]) -> tuple[float, list[Message], dict[str, str]]:
    """(lowest reward, transcript with the tools' real results, final files)."""
    box = LocalSandbox(task.sandbox) if task.sandbox else None
    transcript = list(task.prompt)
    try:
        for turn in turns:
            transcript.append(turn)
            if box is not None:
                transcript += [Message("tool", (box.call(call),)) for call in turn.calls]
        score = min(load_reward(name)(task, transcript, box) for name in task.rewards)
        return score, transcript, box.files() if box else {}
    finally:
        if box is not None:
            box.close()


def errors(transcript: Sequence[Message]) -> list[str]:
    return [p.text for m in transcript for p in m.parts if isinstance(p, ToolResult) and p.error]
