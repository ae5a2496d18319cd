"""Group-mean baseline: advantage = reward - mean reward of the group's scored members, no division by the deviation.

A failed member (sandbox or reward broke) is not the policy's doing: it has no reward, enters no mean, and is not
trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from nonet.types import Trajectory

Scored = tuple[Trajectory, float]


def advantages(group: Sequence[Trajectory]) -> list[Scored]:
    """[(trajectory, advantage)] of the members that were scored; empty if fewer than two were."""
    scored = [t for t in group if t.status == "done"]
    if len(scored) < 2:
        return []
    mean = sum(t.reward for t in scored) / len(scored)
    return [(t, t.reward - mean) for t in scored]


def is_dead(scored: Sequence[Scored]) -> bool:
    """True when all members got the same reward, so that no token has an advantage."""
    return len({t.reward for t, _ in scored}) < 2
