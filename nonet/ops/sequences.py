"""Which positions of a [B, T] batch form which sequence: whole rows, rows with right padding, documents packed in rows.

What recurrences need to know, so that no state crosses from one sequence into the next. N sequences; row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor


class Sequences:
    """table_N3: row, first position in it and number of positions of each sequence (int64, on the CPU)."""

    def __init__(self, table_N3: Tensor, B: int, T: int, whole: bool):
        """whole: sequence n starts row n, and there are no others."""
        self.table_N3, self.B, self.T, self.whole = table_N3, B, T, whole

    @staticmethod
    def of(
        B: int, T: int, starts: Sequence[int] | Tensor | None = None, counts: Sequence[int] | Tensor | None = None
    ) -> Sequences:
        """starts: where in the B * T flattened positions a sequence begins, ascending, every row's start among them;
        each ends where the next begins. None: one sequence a row. counts: how many positions of each are real; those
        behind belong to nobody. None: all.
        """
        if starts is None and counts is None:
            return _rows(B, T)
        begins = torch.arange(B) * T if starts is None else torch.as_tensor(starts, dtype=torch.long).cpu()
        _check_starts(begins, B, T)
        lengths = torch.diff(begins, append=torch.tensor([B * T]))
        if counts is not None:
            told = torch.as_tensor(counts, dtype=torch.long).cpu()
            if told.shape != lengths.shape or bool(((told < 0) | (told > lengths)).any()):
                raise ValueError(
                    f"counts {told.tolist()[:8]}: needs one per sequence, from 0 to {lengths.tolist()[:8]}"
                )
            lengths = told
        return Sequences(torch.stack([begins // T, begins % T, lengths], 1), B, T, len(begins) == B)

    def __len__(self) -> int:
        return len(self.table_N3)

    @cached_property
    def counts_N(self) -> Tensor:
        return self.table_N3[:, 2].contiguous()

    @cached_property
    def longest(self) -> int:
        return int(self.counts_N.max())

    @cached_property
    def covers(self) -> bool:
        """Every position belongs to a sequence."""
        return int(self.counts_N.sum()) == self.B * self.T

    @cached_property
    def valid_NL(self) -> Tensor:
        """Of the padded form: False behind each sequence's end."""
        return torch.arange(self.T if self.whole else self.longest) < self.counts_N[:, None]

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """(sequence, position in it, flat position in the batch) of everything that belongs to a sequence."""
        n = torch.arange(len(self)).repeat_interleave(self.counts_N)
        first = self.table_N3[:, 0] * self.T + self.table_N3[:, 1]
        within = torch.arange(len(n)) - (self.counts_N.cumsum(0) - self.counts_N)[n]
        return n, within, first[n] + within

    def pad(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [N, longest, ...], one sequence a row, zeros behind each end; whole rows stay as they are."""
        if self.whole:
            return x_BT
        n, within, flat = (i.to(x_BT.device) for i in self._cells)
        return x_BT.new_zeros(len(self), self.longest, *x_BT.shape[2:]).index_put((n, within), x_BT.flatten(0, 1)[flat])

    def unpad(self, x_NL: Tensor) -> Tensor:
        """Back to [B, T, ...], zeros where nobody is."""
        if self.whole:
            if self.covers:
                return x_NL
            shape = (*self.valid_NL.shape, *[1] * (x_NL.ndim - 2))
            return x_NL.masked_fill(~self.valid_NL.view(shape).to(x_NL.device), 0)
        n, within, flat = (i.to(x_NL.device) for i in self._cells)
        out = x_NL.new_zeros(self.B * self.T, *x_NL.shape[2:]).index_put((flat,), x_NL[n, within])
        return out.unflatten(0, (self.B, self.T))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _rows(B: int, T: int) -> Sequences:
    """Kept between calls, in training and out of it."""
    begins = torch.arange(B) * T
    _check_starts(begins, B, T)
    return Sequences(torch.stack([begins // T, begins % T, torch.full((B,), T)], 1), B, T, True)


def _check_starts(begins_N: Tensor, B: int, T: int) -> None:
    if B == 0 or T == 0:
        raise ValueError(f"a batch of {B} rows and {T} positions: nothing to do; needs at least one of each")
    ascending = begins_N.ndim == 1 and len(begins_N) > 0 and bool((begins_N.diff() > 0).all())
    if not ascending or int(begins_N[0]) != 0 or int(begins_N[-1]) >= B * T:
        raise ValueError(f"starts {begins_N.tolist()[:8]}: must ascend from 0 and stay below {B * T}")
    if not bool(torch.isin(torch.arange(B) * T, begins_N).all()):
        raise ValueError(
            f"starts {begins_N.tolist()[:8]}: no sequence may cross rows, so multiples of {T} belong to it"
        )
