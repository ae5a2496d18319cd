"""The prefix cache: a tree of pages by what they hold, and where in it a request may start.

The key of a page is (salt, digest of all tokens up to its end); the salt names model, dtype, kernels and weight version
(`Engine`), so memory of other weights can't be found. A request may start at the deepest position where every page is
there and, in a hybrid model, a snapshot of the KDA state; pages behind it are replayed, never trusted without one.

Pages belong to the tree and to the rows that read them at once. Given up are, in this order: pages that no page and no
snapshot needs, least recently used first; then the snapshot of least value, which makes such pages.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from nonet.engine.ledger import Ledger
from nonet.engine.snapshots import Kind, Node, Salt, Snapshot, Snapshots, Tail
from nonet.model.state import PAGE, Memory

_GONE = 1 << 16  # digests remembered of what was given up, to say why a request missed


@dataclass(frozen=True, slots=True)
class Match:
    """length      where the request may start; its pages are those of `node` and before, and the snapshot's tail
    paged       how far pages alone reached
    reason      why the rest was not there: "" (nothing is missing), cold, evicted, version, snapshot
    """

    length: int
    paged: int
    node: Node
    snapshot: Snapshot | None
    reason: str


def digests(tokens: Sequence[int], known: list[bytes]) -> list[bytes]:
    """`known` completed: for every whole page, the digest of all tokens up to its end."""
    for i in range(len(known), len(tokens) // PAGE):
        block = np.array(tokens[i * PAGE : (i + 1) * PAGE], np.int64).tobytes()
        known.append(blake2b(block, digest_size=16, key=known[-1] if known else b"").digest())
    return known


class PrefixCache:
    def __init__(self, ledger: Ledger, snapshots: Memory, budget: int, pages: int | None):
        """budget: of snapshots; pages: how many may be kept, beside those that rows use anyway (None: no limit)."""
        self.ledger, self.pages, self.now = ledger, pages, 0
        self.snapshots = Snapshots(ledger, snapshots, budget)
        self._nodes: dict[tuple[Salt, bytes], Node] = {}
        self._roots: dict[Salt, Node] = {}
        self._idle: list[tuple[int, int, Node]] = []  # heap: last use, tie-break, page that nothing needs
        self._count = itertools.count()
        self._gone: OrderedDict[bytes, str] = OrderedDict()  # digest -> why it is not here

    def __len__(self) -> int:
        return len(self._nodes)

    # ------------------------------------------------------------------ match

    def match(self, salt: Salt, tokens: Sequence[int], chain: Sequence[bytes]) -> Match:
        """Where a request for the token after `tokens` may start: before the last of them, which must be computed."""
        last = len(tokens) - 1
        path = [self._root(salt)]
        for digest in chain[: last // PAGE]:
            node = self._nodes.get((salt, digest))
            if node is None:
                break
            path.append(node)
        paged = path[-1].length
        for node in reversed(path):
            snapshot = _longest(node, tokens, last)
            if snapshot is not None or not self.snapshots.hybrid or node.parent is None:
                return self._found(node, snapshot, paged, last, chain)
        raise AssertionError("a path starts at a root")

    def _found(self, node: Node, snapshot: Snapshot | None, paged: int, last: int, chain: Sequence[bytes]) -> Match:
        length = node.length if snapshot is None else snapshot.length
        reason = ""
        if length < paged:
            reason = "snapshot"
        elif length // PAGE < last // PAGE:
            reason = self._gone.get(chain[paged // PAGE], "cold")
        return Match(length, paged, node, snapshot, reason)

    def pin(self, match: Match) -> list[int]:
        """The pages up to the match, in order, shared with the caller; its snapshot stays until `unpin`. Comes before
        anything is allocated, because allocating gives up what nobody uses.
        """
        pages = [node.page for node in match.node.path()][::-1]
        for page in pages:
            self.ledger.pages.share(page)
        if match.snapshot is not None:
            match.snapshot.pinned = True
        return pages

    def unpin(self, match: Match) -> None:
        if match.snapshot is not None:
            match.snapshot.pinned = False

    def hit(self, match: Match) -> None:
        """A request starts there."""
        self.now += 1
        for node in match.node.path():
            node.used = self.now
        if match.snapshot is not None:
            match.snapshot.hit(self.now)

    # ---------------------------------------------------------------- publish

    def publish(self, salt: Salt, chain: Sequence[bytes], pages: Sequence[int]) -> Node:
        """Make whole pages known under the digests of `chain`; of two with the same tokens the first one stays."""
        node = self._root(salt)
        for digest, page in zip(chain, pages, strict=False):
            child = self._nodes.get((salt, digest))
            if child is None:
                self.ledger.pages.share(page)
                child = Node(salt, digest, node, page, node.length + PAGE)
                self._nodes[salt, digest] = child
                self._gone.pop(digest, None)
                node.children += 1
            child.used = self.now
            node = child
        self._settle(node)
        self.trim()
        return node

    def remember(
        self, node: Node, tail: Tail, row_slot: int, page: int | None, kind: Kind, before: Snapshot | None
    ) -> Snapshot | None:
        """A snapshot of the state in `row_slot`, after node and tail. page: of the tail, shared with the caller.

        before: the last snapshot of the same conversation, left behind unless others use it. Returns the last one now,
        which is `before` where nothing is worth keeping or there is no room.
        """
        known = node.ends.get(tail)
        if known is not None or not (tail or self.snapshots.hybrid):
            return known or before
        if self.snapshots.full and not self._drop_worst():
            return before
        if page is not None:
            self.ledger.pages.share(page)
        while before is not None and before not in self.snapshots.kept:
            before = before.before
        taken = Snapshot(node, tail, kind, None, page, self.now, before)
        self.snapshots.take(taken, row_slot)
        return taken

    # ------------------------------------------------------------------ evict

    def evict(self) -> bool:
        """Give up one page, or a snapshot where no page is idle. False: everything is in use."""
        pinned = []
        gave = False
        while self._idle and not gave:
            used, _, node = heapq.heappop(self._idle)
            if not self._is_idle(node):
                continue
            if node.used != used:
                self._settle(node)
            elif self.ledger.pages.owners[node.page] > 1:
                pinned.append(node)
            else:
                self._drop(node, "evicted")
                gave = True
        for node in pinned:
            self._settle(node)
        return gave or self._drop_worst()

    def trim(self) -> None:
        """Back to the budget of pages, as far as rows permit."""
        while self.pages is not None and len(self._nodes) > self.pages and self.evict():
            pass

    def forget(self, keep: Collection[Node] = ()) -> None:
        """The weights have changed: everything but some nodes, with their snapshots and the pages before them."""
        for snapshot in list(self.snapshots.kept):
            if snapshot.node not in keep:
                self.snapshots.drop(snapshot)
        needed = {node for last in keep for node in last.path()}
        for node in sorted(self._nodes.values(), key=lambda n: -n.length):
            if node not in needed:
                self._drop(node, "version")
        self._roots = {node.salt: self._roots[node.salt] for node in keep}
        self._idle = []
        for node in self._nodes.values():
            self._settle(node)

    def owned(self) -> tuple[Counter[int], Counter[int]]:
        """Pages the cache owns, and slots its snapshots own."""
        pages = Counter(node.page for node in self._nodes.values())
        pages.update(s.page for s in self.snapshots.kept if s.page is not None)
        return pages, Counter(s.slot for s in self.snapshots.kept if s.slot is not None)

    # ------------------------------------------------------------------- tree

    def _root(self, salt: Salt) -> Node:
        return self._roots.setdefault(salt, Node(salt, b"", None, -1, 0))

    def _is_idle(self, node: Node) -> bool:
        alive = self._nodes.get((node.salt, node.digest)) is node
        return alive and not node.children and not node.ends

    def _settle(self, node: Node) -> None:
        """Enter a page that nothing needs among those to give up."""
        if self._is_idle(node):
            heapq.heappush(self._idle, (node.used, next(self._count), node))

    def _drop(self, node: Node, why: str) -> None:
        assert node.parent is not None and not node.children and not node.ends
        del self._nodes[node.salt, node.digest]
        self.ledger.pages.release(node.page)
        node.parent.children -= 1
        self._settle(node.parent)
        self._gone[node.digest] = why
        if len(self._gone) > _GONE:
            self._gone.popitem(last=False)

    def _drop_worst(self) -> bool:
        worst = self.snapshots.worst(self.now)
        if worst is None:
            return False
        self.snapshots.drop(worst)
        self._settle(worst.node)
        return True


def _longest(node: Node, tokens: Sequence[int], last: int) -> Snapshot | None:
    """The deepest snapshot at this node that `tokens` agree with and that ends by position `last`."""
    rest = tuple(tokens[node.length : min(last, node.length + PAGE - 1)])
    fits = [s for tail, s in node.ends.items() if tail == rest[: len(tail)]]
    return max(fits, key=lambda s: len(s.tail), default=None)
