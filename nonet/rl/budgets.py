"""Token budgets b0(x): how much the cold-start model writes for a problem, measured once and kept as JSON.

T(y), what a budget limits, is said per domain. "thinking": tokens between the harness's think marks. "policy": all that
the policy wrote, tool calls with their arguments and the ends of its turns included.

A measurement is kept as it was made, a row an attempt; the mean over attempts (K3's budgets) and a percentile over
correct ones (Toggle's) follow from it. Attempts are drawn by counter, so a measurement that is killed starts over with
the same outcome, and one that is written is never made again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from nonet.chat import Tokenizer
from nonet.config import Config
from nonet.model import Model
from nonet.rl.config import RLConfig
from nonet.rl.evaluate import evaluate
from nonet.rl.setting import Setting
from nonet.run import write_atomic
from nonet.types import EFFORTS, HarnessSpec, Task, Trajectory, UserError

Counts = Literal["thinking", "policy"]


class BudgetConfig(Config):
    tasks: int = Field(default=256, ge=1)  # train tasks the cold-start model is measured on, from the first on
    samples: int = Field(default=4, ge=1)  # K: attempts at each
    effort: str = "max"  # the level they are made at: b0 is a property of the problem, levels differ by multiplier
    # whose mean b0(x) is: "kind", all measured tasks of x's source; "task", x itself where it was measured (choose
    # `tasks` to cover a finite set), else its kind
    per: Literal["kind", "task"] = "kind"
    # T(y) by domain; one that is not named counts "policy"
    counts: Mapping[str, Counts] = Field(default_factory=lambda: {"general": "thinking"})

    @field_validator("effort")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in EFFORTS:
            raise ValueError(f"{value!r} is not an effort; use {', '.join(EFFORTS)}")
        return value

    def spent(self, t: Trajectory, task: Task, setting: Setting) -> int:
        """T(y)."""
        if self.counts.get(task.domain, "policy") == "policy":
            return t.policy_tokens
        return thinking_tokens(t, setting.spec, setting.tokenizer)


# ------------------------------------------------------------------ counting


def thinking_tokens(t: Trajectory, spec: HarnessSpec, tokenizer: Tokenizer) -> int:
    """Tokens of thoughts, over all the policy's turns, each read as a whole whatever pauses cut it into.

    A token counts if any of its text lies between the marks, so the marks' own tokens do not. A thought that is never
    closed lasts to the end of its turn: leaving the mark out is no way round a budget.
    """
    total = 0
    for author, run in groupby(t.segments, key=lambda s: s.author):
        if author == "policy":
            ids = [i for s in run for i in s.tokens]
            total += _within(tokenizer.pieces(ids[:-1] if ids and ids[-1] in tokenizer.stop_ids else ids), spec)
    return total


def _within(pieces: list[str], spec: HarnessSpec) -> int:
    """How many pieces of a turn have text in a thought; one without text counts where it stands."""
    thoughts = [m.span("thought") for m in _marks(spec).finditer("".join(pieces)) if m["thought"] is not None]
    count = at = 0
    for piece in pieces:
        end = at + len(piece)
        count += any(begin < max(end, at + 1) and at < stop for begin, stop in thoughts)
        at = end
    return count


def _marks(spec: HarnessSpec) -> re.Pattern[str]:
    """Thoughts, and calls: a mark inside a call's arguments is text."""
    to, tc, o, c = map(re.escape, (spec.think_open, spec.think_close, spec.call_open, spec.call_close))
    return re.compile(rf"{to}(?P<thought>.*?)(?:{tc}|\Z)|{o}.*?(?:{c}|\Z)", re.DOTALL)


# ----------------------------------------------------------------- measuring


class Measured(NamedTuple):
    """One attempt of the cold-start model: T, and the task's own reward."""

    task: str
    tokens: int
    reward: float


class Budgets:
    @classmethod
    def open(cls, file: Path, config: BudgetConfig) -> Budgets:
        """Those that `measured` wrote. UserError where they were measured otherwise."""
        found = json.loads(file.read_text())
        if found["config"] != config.model_dump(mode="json"):
            raise UserError(f"{file}: was measured with other settings of [effort.budget]; delete it to measure again")
        return cls([Measured(*row) for row in found["attempts"]], config.per)

    def __init__(self, attempts: list[Measured], per: Literal["kind", "task"] = "kind"):
        self.attempts, self.per = attempts, per

    def mean(self, task: Task) -> float:
        """b0(x): mean T."""
        found = self._about(task)
        return sum(a.tokens for a in found) / len(found)

    def percentile(self, task: Task, share: float, correct: float) -> float:
        """The least T within which `share` of the correct attempts (reward at least `correct`) stay; infinite if no
        attempt was.
        """
        tokens = sorted(a.tokens for a in self._about(task) if a.reward >= correct)
        return tokens[math.ceil(share * len(tokens)) - 1] if tokens else math.inf

    def _about(self, task: Task) -> list[Measured]:
        keys = (problem(task.id), kind(task.id)) if self.per == "task" else (kind(task.id),)
        for key in keys:
            if key in self._by_key:
                return self._by_key[key]
        raise UserError(f"task {task.id}: no attempt at its kind was measured; raise effort.budget.tasks")

    @cached_property
    def _by_key(self) -> dict[str, list[Measured]]:
        out: dict[str, list[Measured]] = {}
        for a in self.attempts:
            out.setdefault(problem(a.task), []).append(a)
            out.setdefault(kind(a.task), []).append(a)
        return out


def problem(task_id: str) -> str:
    """A written-down task that comes round again has "@2" after its name; it is the same problem."""
    return re.sub(r"@\d+$", "", task_id)


def kind(task_id: str) -> str:
    """The name of the source that a task is from.

    >>> kind("general.add/train/17")
    'general.add'
    """
    return re.split("/(?:train|heldout)/", task_id)[0]


def measured(model: Model, setting: Setting, config: BudgetConfig, rl: RLConfig, file: Path) -> Budgets:
    """The budgets in `file`; made with `model` and written there first if there are none."""
    if not file.exists():
        write_atomic(file, json.dumps(_measure(model, setting, config, rl)))
    return Budgets.open(file, config)


def _measure(model: Model, setting: Setting, config: BudgetConfig, rl: RLConfig) -> dict[str, Any]:
    """Attempts that broke (sandbox, reward) are left out."""
    at = replace(setting, efforts=(config.effort,))
    played = evaluate(
        model, at, range(config.tasks), rl.temperature, rl.max_tokens, rl.max_batch, "train", config.samples
    )
    rows = [
        Measured(t.task_id, config.spent(t, at.task("train", t.group), at), t.reward)
        for t in played
        if t.status == "done"
    ]
    return {"config": config.model_dump(mode="json"), "attempts": rows}
