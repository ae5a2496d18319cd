"""KDA states kept at chosen positions: without one, cached pages of a hybrid model are of no use.

A snapshot stands at a node of the prefix cache (whole pages) plus a tail of fewer than 16 tokens, whose keys and values
it keeps in a page of its own. Snapshots live in a memory apart from the rows', so none is ever shared with a writer:
it is copied when it is taken and when it is used. In a model without KDA only tails are kept.

What goes first when the budget is used up (`Snapshots.worst`): snapshots that a later one of the same conversation
replaced, oldest first; then those with the lowest value, tokens saved * (1 + hits) / age. All weigh the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nonet.engine.ledger import Ledger
from nonet.model.state import Memory

if TYPE_CHECKING:
    from nonet.engine.prefix import Node

# Where it was taken: after the first message, where a second request diverged, after the last message, where a
# completion ended. The first two are shared by nature: a conversation that moves on does not replace them.
Kind = Literal["system", "junction", "message", "end"]


@dataclass(slots=True, eq=False)
class Snapshot:
    node: Node
    tail: tuple[int, ...]
    kind: Kind
    slot: int | None  # None: the model has no KDA layer
    page: int | None  # of the tail; None: there is none
    saves: int  # positions behind the snapshot before it
    used: int  # the request that took or used it last, by number
    hits: int = 0
    replaced: bool = False
    pinned: bool = False

    @property
    def length(self) -> int:
        return self.node.length + len(self.tail)


class Snapshots:
    """At most `budget` snapshots; `memory` holds their states, in the dtype it was made with."""

    def __init__(self, ledger: Ledger, memory: Memory, budget: int):
        self.ledger, self.shelf, self.budget = ledger, Ledger(memory, 0, budget), budget
        self.hybrid = any("matrix" in layer for layer in memory.layers)
        self.kept: dict[Snapshot, None] = {}

    def take(
        self, node: Node, tail: tuple[int, ...], row_slot: int, page: int | None, kind: Kind, now: int
    ) -> Snapshot:
        """Of the state in a row's slot. `page`, of the tail, becomes the snapshot's own. There must be room."""
        slot = None
        if self.hybrid:
            slot = self.shelf.slots.take()
            assert slot is not None
            self.shelf.memory.copy_slot(row_slot, slot, self.ledger.memory)
        found = Snapshot(node, tail, kind, slot, page, node.length + len(tail), now)
        node.ends[tail] = found
        self.kept[found] = None
        return found

    def restore(self, snapshot: Snapshot, row_slot: int, row_page: int | None) -> None:
        """Copy it to where a row may write: its state to a slot, its tail to a page."""
        if snapshot.slot is not None:
            self.ledger.memory.copy_slot(snapshot.slot, row_slot, self.shelf.memory)
        if snapshot.page is not None and row_page is not None:
            self.ledger.memory.copy_page(snapshot.page, row_page)

    def drop(self, snapshot: Snapshot) -> None:
        del self.kept[snapshot], snapshot.node.ends[snapshot.tail]
        if snapshot.slot is not None:
            self.shelf.slots.release(snapshot.slot)
        if snapshot.page is not None:
            self.ledger.pages.release(snapshot.page)

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.budget

    def worst(self, now: int) -> Snapshot | None:
        """What is given up first; None if everything is in use or there is nothing."""
        free = (s for s in self.kept if not s.pinned)
        return min(free, key=lambda s: (not s.replaced, s.used if s.replaced else _value(s, now)), default=None)


def _value(s: Snapshot, now: int) -> float:
    return s.saves * (1 + s.hits) / (1 + now - s.used)
