"""Blocks of `ops.overlap` in C on the CPU: float32, 16 rows at a time, products included (native/overlap.c); bfloat16,
with torch's products, which are three times as fast, and in C what comes between them (native/overlap_rows.c).
"""

from __future__ import annotations

import struct
from functools import cached_property

import torch
from torch import Tensor

from nonet import native
from nonet.ops.overlap_blocks import Blocks, Head
from nonet.ops.overlap_rules import Measures, Push

LANES = 16  # as in native/vector.h
_NOBODYS = -1e30  # logits of columns that are no token


def fits(x: Tensor) -> bool:
    """Whether the C side takes tensors like x on this machine."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and native.library() is not None


def fits_rows(draft: Head, target: Head) -> bool:
    """Whether the rows in bfloat16 do: heads of the same tokens."""
    alike = draft.hidden_TD.dtype == target.hidden_TD.dtype == torch.bfloat16
    same = len(draft.weight_WD) == len(target.weight_WD)
    return alike and same and draft.hidden_TD.device.type == "cpu" and native.library() is not None


class NativeBlocks(Blocks):
    """Logits lie [token, row]; `measure` makes them, `descend` reads them."""

    def allocate(self) -> None:
        self.rows = LANES
        own = len(self.draft.weight_WD)
        self.log_p, self.log_q = (self.draft.hidden_TD.new_empty(own, LANES) for _ in range(2))

    def measure(self, at: slice) -> Measures:
        found = self.log_q.new_empty(5, LANES)
        rows = at.stop - at.start
        q, p = self._dense
        t2d_V, lse = self.kept.t2d_V(), None
        if self.target.lse_T is not None:
            lse = self.log_q.new_zeros(LANES)
            lse[:rows] = self.target.lse_T[at]
        _call(
            "overlap_measure",
            *(q[0][at], q[1], p[0][at], p[1], t2d_V, lse, self.log_q, self.log_p, found),
            *(rows, q[0].shape[1], p[0].shape[1], len(q[1]), len(p[1]), torch.get_num_threads()),
            *(1 / self.draft.temperature, 1 / self.target.temperature),
        )
        return Measures(*found[:, :rows])

    def descend(self, at: slice, push: Push) -> None:
        rows = at.stop - at.start
        told = self.log_q.new_zeros(3, LANES)
        told[:, :rows] = torch.stack(push)
        h, w = self._dense[0]
        d_hidden = None if self.d_hidden_TD is None else self.d_hidden_TD[at]
        _call(
            "overlap_descend",
            *(h[at], w, self.log_q, self.log_p, told, d_hidden, self.d_weight_WD),
            *(rows, h.shape[1], len(w), torch.get_num_threads()),
        )

    @cached_property
    def _dense(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(hidden, head) of draft and target, rows one after another."""
        q, p = self.draft, self.target
        return (q[0].contiguous(), q[1].contiguous()), (p[0].contiguous(), p[1].contiguous())


class RowBlocks(Blocks):
    """Logits lie [row, token] in bfloat16; `descend` leaves the slopes in place of the draft's."""

    BYTES = 24 << 20  # of a block's logits, draft's and target's

    def allocate(self) -> None:
        own = len(self.draft.weight_WD)
        columns = -(-own // LANES) * LANES
        self.rows = max(1, min(self.BYTES // (4 * columns), len(self.draft.hidden_TD)))
        self.z_q, self.z_p = (self.draft.hidden_TD.new_full((self.rows, columns), _NOBODYS) for _ in range(2))
        self.lse = self.draft.hidden_TD.new_empty(2, self.rows, dtype=torch.float32)

    def measure(self, at: slice) -> Measures:
        rows = at.stop - at.start
        for z, head in ((self.z_q, self.draft), (self.z_p, self.target)):
            torch.mm(head.hidden_TD[at], head.weight_WD.T, out=z[:rows, : len(head.weight_WD)])
        known = self.target.lse_T
        self.lse = self.lse.new_empty(2, rows)
        if known is not None:
            self.lse[1] = known[at]
        found = self.lse.new_empty(5, rows)
        _call(
            "overlap_rows_measure",
            *(self.z_q, self.z_p, self.lse, found, rows, self.z_q.shape[1], int(known is not None)),
            *(torch.get_num_threads(), 1 / self.draft.temperature, 1 / self.target.temperature),
        )
        return Measures(*found)

    def descend(self, at: slice, push: Push) -> None:
        rows = at.stop - at.start
        _call(
            "overlap_rows_slopes",
            *(self.z_q, self.z_p, self.lse, torch.stack(push).contiguous(), rows, self.z_q.shape[1]),
            *(torch.get_num_threads(), 1 / self.draft.temperature, 1 / self.target.temperature),
        )
        h, w = self.draft.hidden_TD[at], self.draft.weight_WD
        slopes = self.z_q[:rows, : len(w)]
        if self.d_hidden_TD is not None:
            self.d_hidden_TD[at] += slopes @ w
        if self.d_weight_WD is not None:
            self.d_weight_WD += slopes.T @ h
        self.z_q[:rows, len(w) :] = _NOBODYS


def _call(name: str, *words: Tensor | int | float | None) -> None:
    """Call a C function that takes one struct of 64-bit words and returns 0, or 1 when memory ran out."""
    library = native.library()
    assert library is not None
    plain = [0 if w is None else w.data_ptr() if isinstance(w, Tensor) else w for w in words]
    form = "".join("d" if isinstance(w, float) else "q" for w in plain)
    if getattr(library, name)(struct.pack(form, *plain)):
        raise MemoryError(f"{name}: no memory for the scratch of {torch.get_num_threads()} threads")
