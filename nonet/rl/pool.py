"""The pool of groups that are not yet trained: which trajectories run next, which groups are complete.

Exactly-once accounting lives here. A group is drawn once (`next_group` only grows), held until its last sibling has
ended, and released once. Parked trajectories go first, oldest policy version first; new groups only fill what room is
left. Finished samples that wait for their siblings are not active, so they never count toward the pause fraction
(counting them would live-lock the loop below about one half).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.types import Trajectory


class Pool:
    def __init__(self, groups: int, samples: int):
        self.groups, self.samples = groups, samples
        self.next_group = 0
        self.held: dict[int, list[Trajectory]] = {}

    def take(self, task_id: Any) -> list[Trajectory]:
        """What runs in this iteration, in order. `task_id(group)` names the task of a new group."""
        parked = [t for g in self.held.values() for t in g if t.status == "parked"]
        parked.sort(key=lambda t: (t.versions[0] if t.versions else 1 << 60, t.group, t.sample))
        room = self.groups * self.samples - len(parked)
        fresh = [t for _ in range(room // self.samples) for t in self._draw(task_id)]
        return parked + fresh

    def release(self) -> list[list[Trajectory]]:
        """Complete groups, in the order they were drawn; each leaves the pool."""
        ready = [g for g, members in self.held.items() if all(t.status in ("done", "failed") for t in members)]
        return [self.held.pop(g) for g in sorted(ready)]

    def _draw(self, task_id: Any) -> list[Trajectory]:
        group = self.next_group
        self.next_group += 1
        self.held[group] = [Trajectory(task_id(group), group, s) for s in range(self.samples)]
        return self.held[group]

    @property
    def parked(self) -> int:
        return sum(t.status == "parked" for g in self.held.values() for t in g)

    def to_json(self) -> dict[str, Any]:
        held = {str(g): [t.to_json() for t in members] for g, members in self.held.items()}
        return {"next_group": self.next_group, "held": held}

    def restore(self, data: Mapping[str, Any]) -> None:
        self.next_group = data["next_group"]
        self.held = {int(g): [Trajectory.from_json(t) for t in members] for g, members in data["held"].items()}
