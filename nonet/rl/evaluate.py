"""Held-out reward of a model, with confidence intervals; gains are paired by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nonet.engine import Engine
from nonet.model import Model
from nonet.progress import progress
from nonet.protocols import Generator
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import scorer
from nonet.rl.setting import Setting, Split
from nonet.types import Sampling, Trajectory, UserError

Z95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval (normal approximation over independent prompts)."""

    n: int
    mean: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    n = len(values)
    mean = sum(values) / n
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, n - 1) / n)
    return Estimate(n, mean, mean - Z95 * spread, mean + Z95 * spread)


def gain(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean of after - before over the prompts both have, with the interval of the paired differences."""
    return estimate([after[k] - before[k] for k in before if k in after])


def evaluate(
    model: Model,
    setting: Setting,
    indices: Sequence[int],
    temperature: float,
    max_tokens: int,
    max_batch: int = 384,
    split: Split = "heldout",
    samples: int = 1,
) -> list[Trajectory]:
    """`played` by an engine over this model."""
    return played(
        Engine(model, max_batch), setting, indices, temperature, max_tokens, max_batch, split=split, samples=samples
    )


def played(
    generator: Generator,
    setting: Setting,
    indices: Sequence[int],
    temperature: float,
    max_tokens: int,
    at_once: int,
    *,
    split: Split = "heldout",
    samples: int = 1,
) -> list[Trajectory]:
    """`samples` attempts at each task of the split, in index order, `at_once` of them at a time. Failed attempts
    (sandbox, reward) are returned with their reason.
    """
    trajectories = [Trajectory(setting.task(split, i).id, i, k) for i in indices for k in range(samples)]
    sampling = Sampling(temperature=temperature, seed=setting.seed)
    rollout = Rollout(generator, setting.opener(split), scorer(setting.rewards_of), sampling, max_tokens)
    mode = "greedy" if temperature == 0 else "sampled"
    with progress(f"evaluating {setting.source.name} ({mode})", len(trajectories)) as bar:
        for start in range(0, len(trajectories), at_once):
            part = trajectories[start : start + at_once]
            rollout.run(part, len(part))
            bar(start + len(part), "")
    return trajectories


def eval_event(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    done = [t for t in trajectories if t.status == "done"]
    if not done:
        raise UserError(f"all {len(trajectories)} attempts failed; the first: {trajectories[0].stop_reason}")
    e = estimate([t.reward for t in done])
    return {
        "n": e.n, "reward": e.mean, "low": e.low, "high": e.high, "failed": len(trajectories) - e.n,
        "length": sum(t.policy_tokens for t in done) / e.n,
    }  # fmt: skip
