"""Blocks of `ops.overlap` in C (native/overlap.c): float32 on the CPU, 16 rows at a time."""

from __future__ import annotations

import struct
from functools import cached_property

import torch
from torch import Tensor

from nonet import native
from nonet.ops.overlap_blocks import Blocks
from nonet.ops.overlap_rules import Measures, Push

LANES = 16  # as in native/vector.h


def fits(x: Tensor) -> bool:
    """Whether the C side takes tensors like x on this machine."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and native.library() is not None


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


def _call(name: str, *words: Tensor | int | float | None) -> None:
    """Call a C function that takes one struct of 64-bit words and returns 0, or 1 when memory ran out."""
    library = native.library()
    assert library is not None
    plain = [0 if w is None else w.data_ptr() if isinstance(w, Tensor) else w for w in words]
    form = "".join("d" if isinstance(w, float) else "q" for w in plain)
    if getattr(library, name)(struct.pack(form, *plain)):
        raise MemoryError(f"{name}: no memory for the scratch of {torch.get_num_threads()} threads")
