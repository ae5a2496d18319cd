"""Give ended trajectories their rewards. A reward that breaks marks its trajectory as failed, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from nonet.harness import Episode
from nonet.protocols import Reward
from nonet.types import Task, Trajectory


def scorer(rewards: Callable[[Task], Mapping[str, Reward]]) -> Callable[[Trajectory, Episode], None]:
    """on_end for `Rollout`: every reward the task names, computed while the sandbox is still open."""

    def score(trajectory: Trajectory, episode: Episode) -> None:
        for name, reward in rewards(episode.task).items():
            try:
                value = float(reward(episode.task, episode.transcript, episode.sandbox))
                if not math.isfinite(value):  # it would spread through the group's mean into every weight
                    raise ValueError(f"{value} is not a score")
                trajectory.rewards[name] = value
            except Exception as e:  # the reward edge: user code may do anything
                trajectory.status, trajectory.stop_reason = "failed", f"reward {name}: {type(e).__name__}: {e}"
                return

    return score
