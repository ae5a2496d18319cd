"""Where a forward's tokens sit: positions, what each may see, where its cache entries go. Computed once, read by all
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nonet.model.tree import Tree
from nonet.ops.unrolled import unrolled_attention


class Documents:
    """Sequences laid end to end in one row [1, N, ...], which must not see each other."""

    def __init__(self, starts: Sequence[int], total: int):
        """starts: first index of each, ascending from 0; total: N."""
        ends = [*starts[1:], total]
        if not starts or starts[0] != 0 or any(a >= b for a, b in zip(starts, ends, strict=True)):
            raise ValueError(f"starts = {list(starts)[:8]} of {total} tokens: must ascend from 0, below the total")
        self.starts, self.total = list(starts), total
        self.ranges = list(zip(starts, ends, strict=True))

    @cached_property
    def positions_N(self) -> Tensor:
        """Each token's index in its own document."""
        return torch.cat([torch.arange(b - a) for a, b in self.ranges])

    def shortened(self) -> Documents:
        """Without the last token of the row."""
        last = self.total - 1
        return Documents([a for a in self.starts if a < last], last)


class Unrolled:
    """Keys and values of the steps of a draft layer that is applied to its own outputs (ops/unrolled.py). The first
    step is an ordinary causal one; row t of a later one also sees row t, and no other, of the later ones before it.
    """

    def __init__(self, documents: Documents | None):
        self._documents = documents
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, k_BHTK: Tensor, v_BHTV: Tensor) -> int:
        """Keep another step's; returns how many there are."""
        self._keys.append(k_BHTK)
        self._values.append(v_BHTV)
        return len(self._keys)

    def attend(self, q_BHTK: Tensor, scale: float) -> Tensor:
        """The last step's queries, [B, H, T, V]."""
        ranges = None if self._documents is None else self._documents.ranges
        return unrolled_attention(q_BHTK, self._keys, self._values, scale, ranges)


@dataclass
class Span:
    """Where T new positions of B rows sit.

    positions_BT   absolute position of each token
    valid_BT       False on right padding (None: everything is real)
    real_N         indices of the real tokens in the flattened batch (None: all)
    places_N       page, and position in it, where the entry of each real token goes (None: nothing is kept)
    table_BP       pages to read, in order (None: fresh, nothing to read)
    slots          KDA slots of the rows: a slice where rows lie end to end, each in row_pages pages
    after_BT       KDA slots that get the state after each token (None: `slots` get the last)
    mask_B1TL      True where a query may look, over the positions of table_BP (None: fresh and causal)
    documents      of a packed row (None: every row is one sequence)
    tree           of a row of sequences that begin alike (None: it is no such row)
    rotation       cos and signed sin of the positions (None: a model without rotary positions)
    unrolled       what earlier steps of an unrolled draft layer wrote (None: this is no such step)
    """

    positions_BT: Tensor | None
    valid_BT: Tensor | None
    counts_B: Tensor | None
    real_N: Tensor | None = None
    places_N: tuple[Tensor, Tensor] | None = None
    table_BP: Tensor | None = None
    slots: Tensor | slice | None = None
    row_pages: int = 0
    mask_B1TL: Tensor | None = None
    documents: Documents | None = None
    tree: Tree | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    unrolled: Unrolled | None = None
    after_BT: Tensor | None = None

    @staticmethod
    def fresh() -> Span:
        """Whole causal sequences, nothing padded, nothing kept."""
        return Span(None, None, None)
