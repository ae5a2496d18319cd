"""Verifiers by name: what a Task's `rewards` and `--reward` refer to.

Owns: `exact`, `files`, `python_tests`, `gym`, and the way to a user's own function.

Invariant: a built-in verifier returns a number in [0, 1] for any transcript whatever, and gives nothing for an empty
one. A verifier whose task lacks what it needs (no answer, no tests) is the task's mistake: a UserError.
Refuses: catching what a user's own reward raises; the caller records that as a failed attempt.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, cast

from nonet.protocols import Reward, Sandbox
from nonet.tasks import attribute
from nonet.tasks.python_tests import python_tests
from nonet.types import Message, Task, UserError

NUMBER = re.compile(r"[+-]?\d{1,60}(\.\d{1,60})?")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_of(transcript: Sequence[Message]) -> str:
    """The text of the last assistant message, or what stands between its last <answer> and </answer>."""
    for message in reversed(transcript):
        if message.role == "assistant":
            marked = ANSWER.findall(message.text)
            return (marked[-1] if marked else message.text).strip()
    return ""


def needed(task: Task, key: str, reward: str) -> Any:
    if key not in task.data:
        raise UserError(f"task {task.id}: reward {reward!r} needs {key!r}, which the task does not give")
    return task.data[key]


def same_answer(given: str, wanted: str) -> bool:
    """Equal text; equal value if both are plain decimal numbers ("4" and "4.0", "+3" and "3").

    >>> same_answer("04.50", "4.5"), same_answer("4 apples", "4")
    (True, False)
    """
    if NUMBER.fullmatch(given) and NUMBER.fullmatch(wanted):
        return Decimal(given) == Decimal(wanted)
    return given == wanted


def exact(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """1 if the answer is `task.data["answer"]`, else 0."""
    wanted = str(needed(task, "answer", "exact")).strip()
    given = answer_of(transcript)
    return float(bool(given) and same_answer(given, wanted))


def files(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """1 if each file of `task.data["files"]` has that text at the end and none of `task.data["absent"]` exists.

    White space around a file's text is ignored; further files are allowed.
    """
    wanted = needed(task, "files", "files")
    if sandbox is None:
        return 0.0
    found = sandbox.files()
    right = all(path in found and found[path].strip() == text.strip() for path, text in wanted.items())
    return float(right and not any(path in found for path in task.data.get("absent", ())))


def gym(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """reasoning-gym's own score of the answer, clipped to [0, 1]."""
    from nonet.tasks.gym import score  # the wrapper, not the package: that one is loaded at the first score

    return score(task, answer_of(transcript))


REWARDS: dict[str, Reward] = {"exact": exact, "files": files, "python_tests": python_tests, "gym": gym}


def load_reward(spec: str) -> Reward:
    """A built-in reward by name, or a user's own by `pkg.module:function`.

    A reward is called as `reward(task, transcript, sandbox)` and returns a number.
    """
    if ":" in spec:
        found = attribute.load(spec, "--reward")
        if not callable(found):
            raise UserError(f"--reward {spec!r}: is not a function")
        return cast(Reward, found)
    if spec not in REWARDS:
        near = difflib.get_close_matches(spec, REWARDS, n=1, cutoff=0.0)[0]
        raise UserError(f"reward {spec!r}: no such reward; did you mean {near!r}? Your own: pkg.module:function")
    return REWARDS[spec]
