"""Domains and efforts on held-out tasks: what a cell scores and writes, what merging kept, whether levels part.

retention   (merged - cold) / (expert - cold), means over prompts that all three played. Its interval resamples prompts,
            the same ones for all three. It means something only where the expert is better than the cold start, so the
            expert's gain stands beside it; where that mean is not above 0 there is no retention.
separated   the 95% intervals of T do not overlap, level above level
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nonet.ops.rng import stream_key
from nonet.rl.budgets import BudgetConfig
from nonet.rl.evaluate import Estimate, estimate, gain
from nonet.rl.setting import Cell, Setting
from nonet.types import EFFORTS, Trajectory, UserError

RESAMPLED = 2000


@dataclass(frozen=True)
class Played:
    """Held-out attempts of one model at one cell: reward and T by task id. failed: attempts that were not scored."""

    rewards: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    failed: int = 0

    def figures(self) -> dict[str, Any]:
        """For a `cell` event: means and 95% intervals of reward and T."""
        reward, tokens = estimate(list(self.rewards.values())), estimate(list(self.tokens.values()))
        return {
            "n": reward.n, "failed": self.failed, "reward": reward.mean, "low": reward.low, "high": reward.high,
            "tokens": tokens.mean, "tokens_low": tokens.low, "tokens_high": tokens.high,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def by_cell(trajectories: Sequence[Trajectory], setting: Setting, config: BudgetConfig) -> dict[Cell, Played]:
    """One attempt at each held-out task (`evaluate`), sorted into cells. UserError where all of a cell failed."""
    rewards: dict[Cell, dict[str, float]] = {}
    tokens: dict[Cell, dict[str, float]] = {}
    failed: dict[Cell, list[str]] = {}
    for t in trajectories:
        task = setting.task("heldout", t.group)
        cell = task.domain, task.effort
        if t.status == "done":
            rewards.setdefault(cell, {})[t.task_id] = t.reward
            tokens.setdefault(cell, {})[t.task_id] = float(config.spent(t, task, setting))
        else:
            failed.setdefault(cell, []).append(t.stop_reason)
    for cell, reasons in failed.items():
        if cell not in rewards:
            raise UserError(f"{':'.join(cell)}: all {len(reasons)} attempts failed; the first: {reasons[0]}")
    return {cell: Played(rewards[cell], tokens[cell], len(failed.get(cell, ()))) for cell in sorted(rewards)}


# ---------------------------------------------------------------- retention


class Share(NamedTuple):
    """A retention with its 95% interval; an end that is not finite is None."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Retained:
    """cold, expert, merged: mean rewards over n prompts. gain: the expert's over the cold start. share: None where
    there is nothing to retain.
    """

    n: int
    cold: float
    expert: float
    merged: float
    gain: Estimate
    share: Share | None

    def figures(self) -> dict[str, Any]:
        """For a `retention` event."""
        share = self.share._asdict() if self.share is not None else dict.fromkeys(Share._fields)
        return {
            "n": self.n, "cold": self.cold, "expert": self.expert, "merged": self.merged,
            "gain": self.gain.mean, "gain_low": self.gain.low, "gain_high": self.gain.high,
            "retention": share.pop("value"), **share,
        }  # fmt: skip


Rewards = Mapping[str, float]  # by task id


def retention(cells: Mapping[Cell, tuple[Rewards, Rewards, Rewards]]) -> tuple[dict[Cell, Retained], Share | None]:
    """(cold, expert, merged) rewards of each cell -> what each retained, and the mean over cells if each has a share.

    Cells of one domain play the same prompts, so they are resampled alike; domains are resampled independently.
    """
    found: dict[Cell, Retained] = {}
    drawn: list[np.ndarray] = []
    for cell, rewards in sorted(cells.items()):
        common = sorted(set.intersection(*(set(r) for r in rewards)))
        if not common:
            raise UserError(f"{':'.join(cell)}: cold start, expert and merged model have no prompt in common")
        scores_3N = np.array([[r[name] for name in common] for r in rewards])
        cold, expert, merged = map(float, scores_3N.mean(1))
        drawn.append(_resampled(scores_3N, cell[0]))
        share = Share((merged - cold) / (expert - cold), *_within(drawn[-1])) if expert > cold else None
        found[cell] = Retained(len(common), cold, expert, merged, gain(*rewards[:2]), share)
    values = [kept.share.value for kept in found.values() if kept.share is not None]
    if not values or len(values) < len(found):
        return found, None
    return found, Share(sum(values) / len(values), *_within(np.mean(drawn, 0)))


def _resampled(scores_3N: np.ndarray, domain: str) -> np.ndarray:
    """Retentions of prompts drawn again with replacement, [RESAMPLED]; nan where the draw shows no gain at all."""
    n = scores_3N.shape[1]
    rng, out = np.random.default_rng(stream_key(0, domain)), []
    for _ in range(RESAMPLED):
        cold, expert, merged = scores_3N[:, rng.integers(0, n, n)].mean(1)
        out.append((merged - cold) / (expert - cold) if expert != cold else math.nan)
    return np.array(out)


def _within(draws_R: np.ndarray) -> tuple[float | None, float | None]:
    """The middle 95%; a draw that says nothing counts at both ends."""
    low = float(np.quantile(np.nan_to_num(draws_R, nan=-math.inf), 0.025, method="lower"))
    high = float(np.quantile(np.nan_to_num(draws_R, nan=math.inf), 0.975, method="higher"))
    return low if math.isfinite(low) else None, high if math.isfinite(high) else None


# --------------------------------------------------------------- separation


def separation(cells: Mapping[Cell, Played]) -> list[dict[str, Any]]:
    """For a `separation` event each: a domain's levels by T. share: low's mean T over max's, None where one is missing
    or max writes nothing. ordered: reward at max is no less than at low, None likewise.
    """
    out = []
    for domain in sorted({domain for domain, _ in cells}):
        mine = {e: cells[domain, e] for e in EFFORTS if (domain, e) in cells}
        tokens = {e: estimate(list(p.tokens.values())) for e, p in mine.items()}
        rewards = {e: estimate(list(p.rewards.values())).mean for e, p in mine.items()}
        both = "low" in mine and "max" in mine
        out.append({
            "domain": domain, "tokens": {e: [t.mean, t.low, t.high] for e, t in tokens.items()},
            "separated": all(a.high < b.low for a, b in pairwise(tokens.values())),
            "share": tokens["low"].mean / tokens["max"].mean if both and tokens["max"].mean else None,
            "ordered": rewards["max"] >= rewards["low"] if both else None,
        })  # fmt: skip
    return out
