"""Which rows run in a step, on which pages.

Rows are served in order of arrival. A row is given a place when the pages of all its known tokens are there; later it
takes one more page every 16 tokens. When none is left, the cache gives up what nobody uses, then the youngest row goes
back to the head of the queue. What it computed goes to the cache first, so coming back costs little; and since each
draw depends on its position alone, it then writes what it would have written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nonet.engine.ledger import Ledger
from nonet.engine.prefix import Match, PrefixCache, digests
from nonet.engine.row import Report, Row, pages_for
from nonet.engine.snapshots import Kind, Node
from nonet.model.state import PAGE

# A forward for one newcomer costs nearly as much as one for many: while most rows are busy decoding, newcomers gather
# for a few steps. Counted in steps, so a replay gathers the same ones.
GATHER_SHARE, GATHER_STEPS = 8, 4
SHORT = 128  # chunks up to this long share a forward; beyond it, those within a factor of two of each other


@dataclass(frozen=True)
class Batch:
    """Rows that are fed together, counts[i] tokens each. decode: the step's one batch of rows past their prompts; these
    have pages for rooms[i] tokens more, which may be drafted.
    """

    rows: list[Row]
    counts: list[int]
    decode: bool = False
    rooms: list[int] = field(default_factory=list)


class Scheduler:
    """Rows in `waiting` own nothing; rows in `rows`, oldest first, own a slot and pages."""

    def __init__(
        self,
        ledger: Ledger,
        cache: PrefixCache | None,
        max_batch: int,
        chunk: int,
        hybrid: bool,
        drafted: int = 0,
        settle: Callable[[Row], None] | None = None,
    ):
        """chunk: how many tokens of prompts may be computed in a step, beside the rows that decode. drafted: most
        tokens that may be drafted for a row in a step; settle: makes true what its pages hold, before they are kept.
        """
        self.ledger, self.cache, self.hybrid = ledger, cache, hybrid
        self.drafted, self.settle = drafted, settle
        self.max_batch, self.chunk = max_batch, chunk
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self.preemptions = 0
        self._gathered = 0

    # --------------------------------------------------------------- schedule

    def schedule(self) -> list[Batch]:
        self._admit()
        ready: list[Row] = []
        chunks: list[tuple[Row, int]] = []
        budget = self.chunk
        for row in list(self.rows):  # oldest first, so that those who make room have not been scheduled yet
            if not row.placed:  # sent back a moment ago
                continue
            if row.pending == 1 and row.filled:
                if self._extend(row):
                    ready.append(row)
            elif count := self._chunk(row, budget):
                budget -= count
                chunks.append((row, count))
        rooms = [self._room(row) for row in ready]
        batches = [Batch(ready, [1] * len(ready), decode=True, rooms=rooms)] if ready else []
        return batches + _grouped(chunks)

    def _chunk(self, row: Row, budget: int) -> int:
        """How many tokens of a prompt are next: up to the next snapshot, within the budget, whole pages if not all."""
        stop = min((at for at in row.cuts if at > row.filled), default=row.length)
        count = min(stop - row.filled, budget)
        cut = row.filled + count < stop
        return (row.filled + count) // PAGE * PAGE - row.filled if cut and count >= PAGE else count

    def _extend(self, row: Row) -> bool:
        """A page for the row's next position. False: the row itself had to go back."""
        while len(row.pages) * PAGE <= row.filled:
            page = self._page()
            if page is not None:
                row.pages.append(page)
            else:
                youngest = self.rows[-1]
                self.preempt(youngest)
                if youngest is row:
                    return False
        return True

    def _room(self, row: Row) -> int:
        """How many tokens may be drafted for a row: what pages can be had for without sending another row back; none
        for its last one.
        """
        wanted = self.drafted if row.left > 1 else 0
        while len(row.pages) * PAGE <= row.filled + wanted:
            page = self._page()
            if page is None:
                break
            row.pages.append(page)
        return min(wanted, len(row.pages) * PAGE - row.filled - 1)

    def _page(self) -> int | None:
        """A page nobody owns, taken from the cache where there is no other."""
        page = self.ledger.pages.take()
        while page is None and self.cache is not None and self.cache.evict():
            page = self.ledger.pages.take()
        return page

    def _slot(self) -> int:
        slot = self.ledger.slots.take()
        assert slot is not None, f"{self.max_batch} seats and no slot for one of them"
        return slot

    # ------------------------------------------------------------------ admit

    def _admit(self) -> None:
        seats = self.max_batch - sum(1 + len(r.followers) for r in self.rows)
        gathering = len(self.waiting) * GATHER_SHARE < len(self.rows) and self._gathered < GATHER_STEPS
        if not self.waiting or seats == 0 or gathering:
            self._gathered += bool(self.waiting)
            return
        self._gathered = 0
        alike = self._alike()
        budget = self.chunk - sum(r.pending for r in self.rows if r.pending > 1)
        while self.waiting and seats > 0 and budget > 0 and self._place(self.waiting[0]):
            row = self.waiting.popleft()
            self.rows.append(row)
            seats, budget = seats - 1, budget - row.pending
            twins = [r for r in alike.get((row.salt, row.request.tokens), ()) if r is not row][:seats]
            if twins and len(row.tokens) == len(row.request.tokens) and row.placed:
                row.followers, seats = twins, seats - len(twins)
                alike[row.salt, row.request.tokens] = []
                taken = set(map(id, twins))
                self.waiting = deque(r for r in self.waiting if id(r) not in taken)

    def _alike(self) -> dict[tuple[str, tuple[int, ...]], list[Row]]:
        """Waiting rows by prompt, without those that have written something; nothing where memory is not shared."""
        out: dict[tuple[str, tuple[int, ...]], list[Row]] = {}
        for row in self.waiting if self.cache is not None else ():
            if row.length == len(row.request.tokens):
                out.setdefault((row.salt, row.request.tokens), []).append(row)
        return out

    def _place(self, row: Row) -> bool:
        """Give a row pages for all its known tokens and the next, and a slot; False, changing nothing, if it can't."""
        match = None
        if self.cache is not None:
            match = self.cache.match(row.salt, row.tokens, digests(row.tokens, row.chain))
            row.pages = self.cache.pin(match)
        whole = len(row.pages)
        while len(row.pages) < pages_for(row.length + 1):
            page = self._page()
            if page is None:
                break
            row.pages.append(page)
        placed = len(row.pages) * PAGE > row.length
        if placed:
            self._start(row, match, whole)
        else:
            self._let_go(row)
        if self.cache is not None and match is not None:
            self.cache.unpin(match)
        return placed

    def _start(self, row: Row, match: Match | None, whole: int) -> None:
        """Put in place what the match remembers. whole: how many of the row's pages it shares."""
        row.slot = self._slot()
        snapshot = match.snapshot if match is not None else None
        if self.hybrid and snapshot is None:
            self.ledger.memory.clear_slot(row.slot)
        if self.cache is None or match is None:
            row.report = row.report or Report(row.length, 0, -1, 0, "off")
            return
        self.cache.hit(match)
        if snapshot is not None:
            self.cache.snapshots.restore(snapshot, row.slot, row.pages[whole])
        row.filled, row.last, row.entered = match.length, snapshot, max(1, match.length)
        row.cuts = self._cuts(row, match)
        at = -1 if snapshot is None else snapshot.length
        row.report = row.report or Report(row.length, match.paged, at, match.length, match.reason)

    def _cuts(self, row: Row, match: Match) -> dict[int, Kind]:
        """Where to take snapshots on the way: after the first and the last message, and where pages went on without.

        A held request is continued from its end; without boundaries its prompt needs none.
        """
        if not self.hybrid:
            return {}
        prompt = len(row.request.tokens)
        found: dict[int, Kind] = {match.paged: "junction"} if match.reason == "snapshot" else {}
        if not row.request.hold or row.request.boundaries:
            last = (*row.request.boundaries, prompt)[-2 if row.request.boundaries else -1]
            found[min(last, prompt - 1) // PAGE * PAGE] = "message"
        if row.request.boundaries:
            found[min(row.request.boundaries[0], prompt - 1) // PAGE * PAGE] = "system"
        return {at: kind for at, kind in found.items() if at > row.filled}

    # ----------------------------------------------------------------- commit

    def advance(self, row: Row, count: int) -> None:
        """`count` more tokens are in memory; keep what a prompt made, and the state where a snapshot is wanted."""
        row.filled += count
        if count == 1 and row.filled not in row.cuts:
            return
        if self.cache is not None:
            node = self._publish(row)
            if (kind := row.cuts.pop(row.filled, None)) is not None:
                row.last = self.cache.remember(node, (), row.slot, None, kind, row.last)

    def confirm(self, row: Row, count: int, slot: int) -> None:
        """`count` tokens that a row was fed stand; the state after them is in `slot`; spare pages are given back."""
        row.filled += count
        row.slot = slot
        while len(row.pages) > pages_for(row.filled + 1):
            self.ledger.pages.release(row.pages.pop())

    def fork(self, row: Row) -> list[Row]:
        """Give the followers of a row, whose prompt is now in memory, the same: whole pages shared, the rest copied.
        Those that get no page go back to wait. Returns the others.
        """
        placed = []
        for twin in row.followers:
            whole, tail = divmod(row.filled, PAGE)
            page = self._page()
            if page is None:
                self.waiting.appendleft(twin)
                continue
            if tail:
                self.ledger.memory.copy_page(row.pages[whole], page)
            for shared in row.pages[:whole]:
                self.ledger.pages.share(shared)
            twin.pages, twin.slot = [*row.pages[:whole], page], self._slot()
            self.ledger.memory.copy_slot(row.slot, twin.slot)
            twin.filled, twin.last, twin.chain, twin.entered = row.filled, row.last, list(row.chain), row.entered
            twin.report = Report(row.filled, row.filled, -1, row.filled, "")
            placed.append(twin)
        row.followers = []
        self.rows += placed
        return placed

    # ------------------------------------------------------------------ leave

    def keep(self, row: Row) -> Node | None:
        """Hand what a row has computed to the cache, with its state at the exact end."""
        if self.cache is None or not row.filled:
            return None
        if self.settle is not None:
            self.settle(row)
        node = self._publish(row)
        whole, tail = divmod(row.filled, PAGE)
        page = row.pages[whole] if tail else None
        ending = tuple(row.tokens[row.filled - tail : row.filled])
        row.last = self.cache.remember(node, ending, row.slot, page, "end", row.last)
        return node

    def leave(self, row: Row) -> None:
        """Take a row, placed or not, out; its followers wait again."""
        if not row.placed:
            self.waiting = deque(r for r in self.waiting if r is not row)
            for leader in self.rows:
                leader.followers = [r for r in leader.followers if r is not row]
            return
        self.rows.remove(row)
        self._let_go(row)
        self.waiting.extendleft(reversed(row.followers))
        row.followers = []

    def preempt(self, row: Row) -> None:
        self.preemptions += 1
        self.keep(row)
        self.leave(row)
        self.waiting.appendleft(row)

    def _publish(self, row: Row) -> Node:
        assert self.cache is not None
        whole = row.filled // PAGE
        return self.cache.publish(row.salt, digests(row.tokens, row.chain)[:whole], row.pages[:whole])

    def _let_go(self, row: Row) -> None:
        for page in row.pages:
            self.ledger.pages.release(page)
        if row.placed:
            self.ledger.slots.release(row.slot)
        row.pages, row.slot, row.filled, row.cuts, row.entered = [], -1, 0, {}, 1

    def check(self) -> None:
        """Conservation: every page and slot is free or has exactly the owners that can be named."""
        pages, slots = Counter[int](), Counter[int]()
        for row in self.rows:
            pages.update(row.pages)
            slots[row.slot] += 1
        if self.cache is not None:
            cached, shelved = self.cache.owned()
            pages += cached
            self.cache.snapshots.shelf.slots.check(shelved)
        self.ledger.pages.check(pages)
        self.ledger.slots.check(slots)


def _grouped(chunks: list[tuple[Row, int]]) -> list[Batch]:
    """Batches of rows that start fresh (these need no mask) and rows that extend, of similar lengths."""
    groups: dict[tuple[bool, int], list[tuple[Row, int]]] = {}
    for row, count in chunks:
        groups.setdefault((row.filled == 0, max(SHORT, count - 1).bit_length()), []).append((row, count))
    return [Batch([r for r, _ in group], [n for _, n in group]) for group in groups.values()]
