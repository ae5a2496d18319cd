"""Training batches of a feature store: rows cut into windows, shuffled, packed; a batch follows from its step alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from nonet.draft.batch import FeatureBatch
from nonet.draft.store import FeatureStore
from nonet.ops.rng import stream_key
from nonet.types import UserError

Piece = tuple[int, int, int]  # row, first token, the one after the last


@dataclass(frozen=True)
class Windows:
    """Documents of at most `window` tokens, packed into batches [1, T] of at most `tokens`.

    A longer row is cut; its later pieces keep features that saw the whole context, and lose only the draft's own view
    of what lies before the cut. Pieces in which the target wrote nothing are left out. `notes` counts both.
    """

    store: FeatureStore
    window: int
    tokens: int
    seed: int
    pieces: tuple[Piece, ...]
    notes: tuple[str, ...]

    @staticmethod
    def of(store: FeatureStore, window: int, tokens: int, seed: int = 0) -> Windows:
        if window < 2 or tokens < window:
            raise UserError(f"window = {window}, batch_tokens = {tokens}: a window needs 2, a batch a whole window")
        cut = [_cut(i, n, window) for i, n in enumerate(store.lengths)]
        all_pieces = [p for parts in cut for p in parts]
        pieces = tuple(p for p in all_pieces if bool(store.masked(*p)))
        long, empty = sum(len(parts) > 1 for parts in cut), len(all_pieces) - len(pieces)
        notes = []
        if long:
            notes.append(f"{long} of {len(store)} rows are longer than the window of {window} tokens and were cut")
        if empty:
            notes.append(f"{empty} of {len(all_pieces)} windows hold none of the target's words and were left out")
        if max(store.lengths) < window:
            notes.append(f"no row is longer than {max(store.lengths)} tokens: a window of {window} is never filled")
        if not pieces:
            raise UserError("features: no window holds a token that the target wrote, so nothing would be learnt")
        return Windows(store, window, tokens, seed, pieces, tuple(notes))

    @property
    def per_epoch(self) -> int:
        """Batches of one pass over the data; about the same in every epoch."""
        return len(_plan(self, 0))

    def batch(self, step: int) -> FeatureBatch:
        """Of a step, counted from 0 over all epochs."""
        epoch = 0
        while step >= len(plan := _plan(self, epoch)):
            step, epoch = step - len(plan), epoch + 1
        return self.packed(plan[step])

    def in_order(self) -> Iterator[FeatureBatch]:
        """Every piece once, unshuffled: for measuring."""
        yield from (self.packed(group) for group in _packed(self.pieces, self.tokens))

    def packed(self, pieces: Sequence[Piece]) -> FeatureBatch:
        rows = [self.store.row(*piece) for piece in pieces]
        ends = torch.tensor([len(r.tokens_T) for r in rows]).cumsum(0).tolist()
        return FeatureBatch(
            torch.cat([r.tokens_T for r in rows]).unsqueeze(0),
            torch.cat([r.features_TF for r in rows]).unsqueeze(0),
            torch.cat([r.hidden_TD for r in rows]).unsqueeze(0),
            torch.cat([r.mask_T for r in rows]).unsqueeze(0),
            starts=[0, *ends[:-1]],
            lse_BT=torch.cat([r.lse_T for r in rows]).unsqueeze(0),
        )


def _cut(row: int, length: int, window: int) -> list[Piece]:
    return [(row, begin, min(begin + window, length)) for begin in range(0, length, window)]


@lru_cache(maxsize=4)
def _plan(windows: Windows, epoch: int) -> list[list[Piece]]:
    """The batches of an epoch."""
    generator = torch.Generator().manual_seed(stream_key(windows.seed, f"draft/epoch/{epoch}")[0])
    order = torch.randperm(len(windows.pieces), generator=generator).tolist()
    return _packed([windows.pieces[i] for i in order], windows.tokens)


def _packed(pieces: Sequence[Piece], tokens: int) -> list[list[Piece]]:
    """In order, as many as fit into each batch."""
    out: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        length = piece[2] - piece[1]
        if not out or length > room:
            out.append([])
            room = tokens
        out[-1].append(piece)
        room -= length
    return out
