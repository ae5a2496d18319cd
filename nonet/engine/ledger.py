"""Who owns which page and slot of a Memory.

Every page is free, or has owners: rows that read it, the prefix cache, or both; it is counted, and free again when the
last owner lets go. A page with more than one owner is never written. Slots have one owner each. The memory grows, by
doubling, only when nothing is free, up to the limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from nonet.model.state import Memory

FIRST = 64  # pages, or slots, that a memory starts growing from


class Numbers:
    """The numbers 0, 1, ... below `size`, each free or with owners; `limit` None: as many as are asked for."""

    def __init__(self, what: str, limit: int | None, grow: Callable[[int], None]):
        self.what, self.limit, self.grow = what, limit, grow
        self.owners: list[int] = []
        self.free: list[int] = []

    @property
    def size(self) -> int:
        return len(self.owners)

    def take(self) -> int | None:
        """A number that nobody owned; None if all are owned and there may be no more."""
        if not self.free and not self._extend():
            return None
        number = self.free.pop()
        self.owners[number] = 1
        return number

    def share(self, number: int) -> None:
        assert self.owners[number] > 0, f"{self.what} {number} is shared while free"
        self.owners[number] += 1

    def release(self, number: int) -> None:
        assert self.owners[number] > 0, f"{self.what} {number} is released while free"
        self.owners[number] -= 1
        if not self.owners[number]:
            self.free.append(number)

    def check(self, owned: Counter[int]) -> None:
        """AssertionError unless every number has exactly the owners counted in `owned`."""
        wrong = [n for n in range(self.size) if self.owners[n] != owned[n]]
        assert not wrong, f"{self.what}s {wrong[:8]} have {[self.owners[n] for n in wrong[:8]]} owners, found " + str(
            [owned[n] for n in wrong[:8]]
        )
        idle = sorted(n for n in range(self.size) if not owned[n])
        assert sorted(self.free) == idle, f"free {self.what}s are {sorted(self.free)[:8]}, unowned {idle[:8]}"

    def _extend(self) -> bool:
        size = max(FIRST, 2 * self.size)
        size = size if self.limit is None else min(size, self.limit)
        if size <= self.size:
            return False
        self.grow(size)
        self.free += reversed(range(self.size, size))
        self.owners += [0] * (size - self.size)
        return True


class Ledger:
    """A memory with its pages and slots."""

    def __init__(self, memory: Memory, pages: int | None, slots: int | None):
        """pages, slots: limits; None: no limit. The memory starts empty."""
        assert memory.pages == memory.slots == 0
        self.memory = memory
        self.pages = Numbers("page", pages, lambda size: memory.grow(size, 0))
        self.slots = Numbers("slot", slots, lambda size: memory.grow(0, size))
