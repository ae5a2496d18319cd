"""Teachers: who says how likely a token was that the student wrote. Ids in, log-probs out; nothing is generated.

A local teacher is a model directory, or a PEFT directory of LoRA deltas on one. Local teachers share one `Seat`: whose
turn it is has its weights there, and the last one's are gone before they come. A served teacher is served.py's.

What a teacher reads is not what the student read: its prompt leaves the effort message out, for which teacher is asked
already says the effort (K3's formula). The response's tokens are the same, so the two align by offset in the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nonet.chat import Tokenizer
from nonet.engine.scoring import Passage, features, score
from nonet.harness.episode import opening, prompt_ids
from nonet.model import Model, hf, peft
from nonet.rl.setting import Setting
from nonet.sandbox import TOOLS
from nonet.types import Task, Trajectory, UserError

V = TypeVar("V")


class Teacher(Protocol):
    """where: the directory or address it was named by."""

    where: str

    def logprobs(self, passages: Sequence[Passage], temperature: float) -> list[list[float]]:
        """One for each judged token, at the temperature that the student samples with."""
        ...

    def require_vocabulary(self, student: Tokenizer, who: str) -> None:
        """UserError, naming `who`, unless the student's ids mean the same tokens here."""
        ...


class Seat:
    """Room in memory for one local teacher's weights."""

    def __init__(self) -> None:
        self.holds = ""
        self._model: Model | None = None

    def take(self, where: str, load: Callable[[], Model]) -> Model:
        if self._model is None or self.holds != where:
            self._model, self.holds = None, ""  # gone before the next one comes
            self._model, self.holds = load(), where
        return self._model


class LocalTeacher:
    """A model directory here, or a PEFT directory whose base is one (`base`). deterministic: as the engine's,
    every token alone.
    """

    def __init__(self, directory: Path | str, seat: Seat, dtype: str = "float32", deterministic: bool = False):
        self.where, self.seat, self.deterministic = str(directory), seat, deterministic
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.base = peft.base_of(directory) if peft.is_adapter(directory) else Path(directory)

    @property
    def model(self) -> Model:
        return self.seat.take(self.where, self._load)

    def _load(self) -> Model:
        model = hf.load(self.base, self.dtype)
        if peft.is_adapter(self.where):
            peft.merge(model, self.where)
        return model.requires_grad_(False)

    def logprobs(self, passages: Sequence[Passage], temperature: float) -> list[list[float]]:
        return score(self.model, passages, temperature, self.deterministic)

    def require_vocabulary(self, student: Tokenizer, who: str) -> None:
        require_same_vocabulary(student, Tokenizer(self.base), f"{who} = {self.where}")

    def features(self, passages: Sequence[Passage]) -> tuple[list[Tensor], Tensor]:
        """([n, D] of each passage, head [W, D]): their products are the logits of the judged tokens."""
        return features(self.model, passages), self.model.lm_head.weight.detach()


# --------------------------------------------------------------- what it reads


def teacher_prompt(setting: Setting, task: Task, effort: bool = False) -> tuple[int, ...]:
    """The task as the student's harness and template put it, without the effort message unless `effort`."""
    tools = tuple(TOOLS[name] for name in task.sandbox.tools) if task.sandbox is not None else ()
    told = task if effort else replace(task, effort="")
    return tuple(prompt_ids(opening(told, setting.spec, tools), setting.tokenizer))


def passage(trajectory: Trajectory, prompt: Sequence[int] | None = None) -> Passage:
    """The whole attempt behind `prompt` (None: its own), all of the response judged."""
    own, *rest = trajectory.segments
    before = own.tokens if prompt is None else tuple(prompt)
    return Passage((*before, *(t for s in rest for t in s.tokens)), len(before))


def of_policy(trajectory: Trajectory, judged: Sequence[V]) -> list[V]:
    """Of values for every response token, those of the policy's own."""
    at, out = 0, list[V]()
    for s in trajectory.segments[1:]:
        if s.author == "policy":
            out += judged[at : at + len(s.tokens)]
        at += len(s.tokens)
    if at != len(judged):
        raise AssertionError(f"{trajectory.id}: {len(judged)} tokens judged, {at} written")
    return out


# ------------------------------------------------------------------ vocabulary


def require_same_vocabulary(student: Tokenizer, teacher: Tokenizer, who: str) -> None:
    """UserError unless both map the same tokens to the same ids; equal sizes prove nothing."""
    ours, theirs = student.core.get_vocab(True), teacher.core.get_vocab(True)
    if ours == theirs:
        return
    differ = [t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t)]
    token = min(differ, key=lambda t: (ours.get(t, theirs.get(t, 0)), t))
    told = [str(v[token]) if token in v else "absent" for v in (ours, theirs)]
    raise UserError(
        f"{who}: another vocabulary: token {token!r} is {told[0]} for the student and {told[1]} for the teacher, and "
        f"{len(differ)} of {len(ours)} differ; use a teacher with the student's tokenizer"
    )
