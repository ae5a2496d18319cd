"""KDA states kept at chosen positions: without one, cached pages of a hybrid model are of no use.

A snapshot stands at a node of the prefix cache (whole pages) plus a tail of fewer than 16 tokens, whose keys and values
it keeps in a page of its own. Snapshots live in a memory apart from the rows', so none is ever shared with a writer:
it is copied when it is taken and when it is used. In a model without KDA only tails are kept.

What goes first when the budget is used up (`Snapshots.worst`): snapshots that their conversation has left behind, by
moving on or by taking a turn again, oldest first; then those with the lowest value, tokens saved * users / age. All
weigh the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nonet.engine.ledger import Ledger
from nonet.model.state import Memory

Salt = str
Tail = tuple[int, ...]
MOST_OF_ONE = 2  # times one conversation starts from one place: going on, and taking the turn again
# Where it was taken: after the first message, where a second request diverged, after the last message, where a
# completion ended. The first two are shared by nature: a conversation that moves on does not leave them behind.
Kind = Literal["system", "junction", "message", "end"]


@dataclass(slots=True, eq=False)
class Node:
    """One page of 16 tokens, after its parent's; a root, of length 0, has none."""

    salt: Salt
    digest: bytes
    parent: Node | None
    page: int
    length: int
    used: int = 0
    children: int = 0
    ends: dict[Tail, Snapshot] = field(default_factory=dict)

    def path(self) -> Iterator[Node]:
        """This node and those before it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Snapshot:
    node: Node
    tail: Tail
    kind: Kind
    slot: int | None  # None: the model has no KDA layer
    page: int | None  # of the tail; None: there is none
    used: int  # the request that took or used it last, by number
    before: Snapshot | None  # of the same conversation
    after: list[Snapshot] = field(default_factory=list)  # those that have this one before them
    hits: int = 0
    replaced: bool = False  # its conversation has moved on
    pinned: bool = False

    @property
    def length(self) -> int:
        return self.node.length + len(self.tail)

    @property
    def shared(self) -> bool:
        """Several conversations are expected to start here."""
        return self.kind in ("system", "junction") or self.hits > MOST_OF_ONE

    def hit(self, now: int) -> None:
        """A request starts here. If others have gone on from here, theirs was a turn that is now taken again."""
        self.used, self.hits, self.replaced = now, self.hits + 1, False
        if not self.shared:
            for s in self.after:
                s.leave_behind()

    def leave_behind(self) -> None:
        """Its conversation goes on without it, and without what came after it."""
        self.replaced = True
        for s in self.after:
            s.leave_behind()


class Snapshots:
    """At most `budget` snapshots; `memory` holds their states, in the dtype it was made with."""

    def __init__(self, ledger: Ledger, memory: Memory, budget: int):
        self.ledger, self.shelf, self.budget = ledger, Ledger(memory, 0, budget), budget
        self.hybrid = any("matrix" in layer for layer in memory.layers)
        self.kept: dict[Snapshot, None] = {}

    def take(self, taken: Snapshot, row_slot: int) -> None:
        """Keep it, with a copy of the state in a row's slot. There must be room."""
        if self.hybrid:
            taken.slot = self.shelf.slots.take()
            assert taken.slot is not None, "no room for a snapshot"
            self.shelf.memory.copy_slot(row_slot, taken.slot, self.ledger.memory)
        taken.node.ends[taken.tail] = taken
        self.kept[taken] = None
        if (before := taken.before) is not None:
            before.after.append(taken)
            before.replaced |= not before.shared

    def restore(self, snapshot: Snapshot, row_slot: int, row_page: int | None) -> None:
        """Copy it to where a row may write: its state to a slot, its tail to a page."""
        if snapshot.slot is not None:
            self.ledger.memory.copy_slot(snapshot.slot, row_slot, self.shelf.memory)
        if snapshot.page is not None and row_page is not None:
            self.ledger.memory.copy_page(snapshot.page, row_page)

    def drop(self, snapshot: Snapshot) -> None:
        del self.kept[snapshot], snapshot.node.ends[snapshot.tail]
        self._unlink(snapshot)
        if snapshot.slot is not None:
            self.shelf.slots.release(snapshot.slot)
        if snapshot.page is not None:
            self.ledger.pages.release(snapshot.page)

    def _unlink(self, snapshot: Snapshot) -> None:
        before = snapshot.before
        if before is not None:
            before.after.remove(snapshot)
            before.after += snapshot.after
        for s in snapshot.after:
            s.before = before

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.budget

    def worst(self, now: int) -> Snapshot | None:
        """What is given up first; None if everything is in use or there is nothing."""
        free = (s for s in self.kept if not s.pinned)
        return min(free, key=lambda s: (not s.replaced, s.used if s.replaced else self._value(s, now)), default=None)

    def _value(self, s: Snapshot, now: int) -> float:
        """Tokens that would be computed again without it, for each conversation, over the requests since its last use.

        Ages below twice the budget count alike: where conversations take turns, the one that spoke longest ago is the
        next to speak, and giving up the oldest would give up every one just before it is asked for.
        """
        before = s.before
        while before is not None and before.replaced:
            before = before.before
        saved = s.length - (0 if before is None else before.length)
        return saved * (max(1, s.hits) if s.shared else 1) / max(2 * self.budget, now - s.used)
