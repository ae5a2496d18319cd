"""Credit: which trajectories are trained, and what each of their tokens is worth. The loop asks nothing else.

GroupMean: advantage = reward - mean reward of the group's scored members, no division by the deviation. Its rules:

failed member   (sandbox or reward broke) no doing of the policy's: no reward, in no mean, not trained; or, with
                rl.failed_member = "score", scored rl.failed_reward like any other
short group     fewer than two scored members: nothing to compare with, trains nothing
dead group      all rewards equal, no token has an advantage: left out of batch and denominators (drop_dead)
truncated       its budget ended it: scored as it stands and trained; with drop_truncated it is in the group's mean,
                but in neither batch nor denominators
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nonet.rl.batch import Scored
from nonet.rl.config import RLConfig
from nonet.rl.invariants import check_group
from nonet.types import Trajectory

Rewarded = tuple[Trajectory, float]


class Credit(Protocol):
    @property
    def figures(self) -> Mapping[str, Any]:
        """What the last call found out, for the rl_step event."""
        ...

    def __call__(self, groups: Sequence[list[Trajectory]]) -> list[Scored]:
        """What is trained of complete groups."""
        ...

    def explain(self, trajectory: Trajectory) -> dict[str, list[float]]:
        """Named columns for people, a value a policy token, of a trajectory of the last call."""
        ...


@dataclass(frozen=True)
class GroupMean:
    """samples: members of a complete group. failed_reward: of a failed member; None leaves it out."""

    samples: int
    drop_dead: bool = True
    drop_truncated: bool = False
    failed_reward: float | None = None

    @staticmethod
    def of(config: RLConfig) -> GroupMean:
        failed_reward = config.failed_reward if config.failed_member == "score" else None
        return GroupMean(config.samples, config.drop_dead_groups, config.drop_truncated, failed_reward)

    def __call__(self, groups: Sequence[list[Trajectory]]) -> list[Scored]:
        out: list[Scored] = []
        for group in groups:
            check_group(group, self.samples)
            members = rewarded(group, self.failed_reward)
            if len(members) >= 2 and not (self.drop_dead and is_dead(members)):
                out += [s for s in centred(members) if self.trains(s.trajectory)]
        return out

    @property
    def figures(self) -> Mapping[str, Any]:
        return {}

    def explain(self, trajectory: Trajectory) -> dict[str, list[float]]:
        return {}

    def trains(self, t: Trajectory) -> bool:
        return t.policy_tokens > 0 and not (self.drop_truncated and t.stop_reason == "length")


def rewarded(group: Sequence[Trajectory], failed_reward: float | None = None) -> list[Rewarded]:
    """[(trajectory, reward)] of the members that have one."""
    if failed_reward is None:
        return [(t, t.reward) for t in group if t.status == "done"]
    return [(t, t.reward if t.status == "done" else failed_reward) for t in group]


def is_dead(members: Sequence[Rewarded]) -> bool:
    """True when no two rewards differ, so that no token has an advantage."""
    return len({reward for _, reward in members}) < 2


def centred(members: Sequence[Rewarded]) -> list[Scored]:
    """reward - mean, on every policy token alike."""
    mean = sum(reward for _, reward in members) / len(members)
    return [Scored.uniform(t, reward - mean) for t, reward in members]
