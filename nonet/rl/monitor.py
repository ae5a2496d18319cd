"""Figures of one iteration for people: what was sampled, what was trained, what resuming cost.

The bias monitor counts attempts when they close (they end, fail, or are given up for their age), and again when they
are trained. Shares that part over a run show a bias: long attempts given up, or a domain whose groups are all dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nonet.engine import Engine
from nonet.rl.setting import Setting
from nonet.types import Trajectory


def counts(trajectories: Sequence[Trajectory], setting: Setting) -> dict[str, dict[str, int]]:
    """By length (policy tokens, rounded down to a power of two), by age (updates between the first token and the last)
    and by domain: how many.
    """
    by: dict[str, Callable[[Trajectory], Any]] = {
        "length": lambda t: 1 << t.policy_tokens.bit_length() - 1 if t.policy_tokens else 0,
        "age": lambda t: t.versions[-1] - t.versions[0] if t.versions else 0,
        "domain": lambda t: setting.task("train", t.group).domain,
    }
    tables = {name: Counter(map(key, trajectories)) for name, key in by.items()}
    return {name: {str(key): n for key, n in sorted(table.items())} for name, table in tables.items()}


def staleness(trained: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Updates between a trajectory's first token and the update it is trained in."""
    ages = [version - t.versions[0] for t in trained if t.versions]
    return {"age_mean": sum(ages) / max(1, len(ages)), "age_max": max(ages, default=0)}


class EngineCost:
    """What the engine did in an iteration: decode steps, prompt tokens computed and remembered, and how far log-probs
    that rest on memory of older weights are from fresh ones (`on_resume = "reuse"`; over the first few rows).
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._before = self._counts()

    def figures(self) -> dict[str, float]:
        steps, prompt, cached = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        measured = self.engine.figures()
        return {
            "decode_steps": steps, "prefilled": prompt - cached, "cached": cached,
            **{name: measured[name] for name in ("mismatch_rows", "mismatch_max", "mismatch_mean")},
        }  # fmt: skip

    def _counts(self) -> tuple[int, int, int]:
        totals = self.engine.accounts.totals
        return totals["decode_steps_total"], totals["tokens_prompt_total"], totals["tokens_cached_total"]
