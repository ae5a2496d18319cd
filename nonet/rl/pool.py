"""The pool of groups that are not yet trained: which trajectories run next, which groups are complete.

Exactly-once accounting lives here. A group is drawn once (`next_group` only grows), held until its last sibling has
ended, and leaves once: released to be trained, or dropped. Parked trajectories go first, oldest policy version first;
new groups only fill what room is left. Finished samples that wait for their siblings are not active, so they never
count toward the pause fraction (counting them would live-lock the loop below about one half).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nonet.types import Trajectory

_NEVER = 1 << 60


@dataclass(frozen=True)
class Rules:
    """max_age: most updates between a trajectory's first token and the update it is trained in (None: any number).
    stale: what keeps it so. "wait": groups that would be too old after one more pause are finished before it.
    "recycle": members that are too old start over from their prompt. "drop": their whole group goes, untrained.
    retries: a failed member starts over while fewer than this many attempts of it were given up.
    """

    max_age: int | None = None
    stale: Literal["drop", "recycle", "wait"] = "wait"
    retries: int = 0


class Pool:
    def __init__(self, groups: int, samples: int, rules: Rules = Rules()):
        self.groups, self.samples, self.rules = groups, samples, rules
        self.next_group = 0
        self.held: dict[int, list[Trajectory]] = {}

    def refresh(self, version: int) -> tuple[list[Trajectory], list[int]]:
        """Apply the rules before an iteration under `version`. Returns the attempts given up for their age, as they
        stood, and the groups dropped with them.
        """
        for t in self._members("failed"):
            if t.attempt < self.rules.retries:
                t.restart()
        if self.rules.max_age is None or self.rules.stale == "wait":
            return [], []
        since = version - self.rules.max_age
        old = [t for t in self._members("parked", "done") if _first(t) < since]
        if self.rules.stale == "drop":
            dropped = sorted({t.group for t in old})
            return [t for g in dropped for t in self.held.pop(g)], dropped
        given_up = [replace(t) for t in old]
        for t in old:
            t.restart()
        return given_up, []

    def take(self, task_id: Callable[[int], str]) -> list[Trajectory]:
        """What runs in this iteration, in order. `task_id(group)` names the task of a new group."""
        waiting = sorted(self._members("parked", "new"), key=lambda t: (_first(t), t.group, t.sample))
        room = self.groups * self.samples - len(waiting)
        return waiting + [t for _ in range(room // self.samples) for t in self._draw(task_id)]

    def due(self, version: int) -> frozenset[str]:
        """Ids that must end before generation under `version` pauses: their groups would be too old at the next."""
        due = [members for members in self.held.values() if self._is_due(members, version)]
        return frozenset(t.id for members in due for t in members if t.status in ("parked", "new"))

    def release(self, version: int = 0) -> list[list[Trajectory]]:
        """Complete groups, in the order they were drawn; each leaves the pool."""
        ready = [g for g, members in self.held.items() if all(self._ended(t, members, version) for t in members)]
        return [self.held.pop(g) for g in sorted(ready)]

    def _ended(self, t: Trajectory, group: Sequence[Trajectory], version: int) -> bool:
        if t.status == "failed":
            return t.attempt >= self.rules.retries or self._is_due(group, version)
        return t.status == "done"

    def _is_due(self, group: Sequence[Trajectory], version: int) -> bool:
        """Whether one more pause would make a group too old. A group begins at this version at the latest."""
        if self.rules.max_age is None or self.rules.stale != "wait":
            return False
        began = min([version, *(_first(t) for t in group)])
        return version + 1 - began > self.rules.max_age

    def _members(self, *statuses: str) -> list[Trajectory]:
        return [t for members in self.held.values() for t in members if t.status in statuses]

    def _draw(self, task_id: Callable[[int], str]) -> list[Trajectory]:
        group = self.next_group
        self.next_group += 1
        self.held[group] = [Trajectory(task_id(group), group, s) for s in range(self.samples)]
        return self.held[group]

    @property
    def parked(self) -> int:
        return len(self._members("parked"))

    def restore(self, next_group: int, held: Mapping[int, list[Trajectory]]) -> None:
        self.next_group, self.held = next_group, dict(held)


def _first(t: Trajectory) -> int:
    """The policy version that wrote the first token; beyond all versions if there is none."""
    return t.versions[0] if t.versions else _NEVER
