"""Which tokens a step trains on: pure functions of (seed, step) over a corpus.

A piece is a range of the corpus inside one document. `Packed` lays all documents end to end in a shuffled order and
cuts that tape into rows of `context` tokens, which are shuffled again: a document that reaches a row's end is cut there
and goes on in the tape's next row as if it were a new one (its later part sees nothing of the earlier). `Long` takes
only documents of at least `context` tokens, each from its start in whole rows, what is left over dropped: rows that
really are that long, for stages that extend the context. Both go over the whole corpus once before any of it comes
again, in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nonet.lm.corpus import Corpus
from nonet.types import UserError

Piece = tuple[int, int]  # (start, stop) in the corpus


def laid_out(
    corpus: Corpus, documents: np.ndarray, context: int, rows: int, min_document: int, seed: int
) -> Packed | Long:
    """The documents of at least `min_document` tokens: in whole rows if that fills one, packed otherwise."""
    lengths = corpus.lengths_M[documents]
    fitting = documents[lengths >= min_document]
    if not len(fitting):
        raise UserError(
            f"data: no document has min_document = {min_document} tokens (the longest has {lengths.max(initial=0):,}); "
            "give longer documents, or set min_document = 0 to pack short ones"
        )
    kind = Long if min_document >= context else Packed
    return kind(corpus, fitting, context, rows, seed)


class Packed:
    def __init__(self, corpus: Corpus, documents: np.ndarray, context: int, rows: int, seed: int):
        self.corpus, self.documents, self.context, self.rows, self.seed = corpus, documents, context, rows, seed
        tokens = int(corpus.lengths_M[documents].sum())
        self.batches = tokens // context // rows  # in one epoch
        if not self.batches:
            raise UserError(
                f"data: {tokens:,} training tokens are fewer than one batch of {rows} x {context}; "
                "give more data or a smaller pretrain.batch_tokens"
            )
        self._epoch = -1

    def __call__(self, step: int) -> list[Piece]:
        epoch, i = divmod(step, self.batches)
        self._lay(epoch)
        mine = self._rows[i * self.rows : (i + 1) * self.rows].tolist()
        return [p for row in mine for p in self.row(row)]

    def _lay(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        documents, rows = shuffled(self.seed, epoch, len(self.documents), self.batches * self.rows)
        self._order = self.documents[documents]
        self._ends = self.corpus.lengths_M[self._order].cumsum()
        self._rows = rows  # drawn from all over the tape: neighbours are of one document, and a batch should not be
        self._epoch = epoch

    def row(self, number: int) -> Iterator[Piece]:
        """The pieces between two cuts of the tape; a single token predicts nothing and is left out."""
        start, stop = number * self.context, (number + 1) * self.context
        i = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            end = min(stop, int(self._ends[i]))
            document = self._order[i]
            shift = int(self.corpus.documents_M["end"][document]) - int(self._ends[i])  # from tape to corpus
            if end - start > 1:
                yield start + shift, end + shift
            start, i = end, i + 1


class Long:
    def __init__(self, corpus: Corpus, documents: np.ndarray, context: int, rows: int, seed: int):
        self.context, self.rows, self.seed = context, rows, seed
        lengths, starts = corpus.lengths_M[documents], corpus.starts_M[documents]
        whole = zip(starts, lengths // context, strict=True)
        self.starts = np.concatenate([start + np.arange(n) * context for start, n in whole])
        if len(self.starts) < rows:
            raise UserError(
                f"data: {len(self.starts)} whole rows of {context} tokens (the longest document has {lengths.max():,}) "
                f"are fewer than one batch of {rows}; give longer documents, or set min_document = 0 to pack short ones"
            )
        self._epoch = -1

    def __call__(self, step: int) -> list[Piece]:
        epoch, i = divmod(step, len(self.starts) // self.rows)
        if epoch != self._epoch:
            [self._order], self._epoch = shuffled(self.seed, epoch, len(self.starts)), epoch
        chosen = self.starts[self._order[i * self.rows : (i + 1) * self.rows]].tolist()
        return [(start, start + self.context) for start in chosen]


def shuffled(seed: int, epoch: int, *counts: int) -> list[np.ndarray]:
    """A permutation of each count, all from one stream."""
    draw = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return [draw.permutation(count) for count in counts]


def micro_batches(pieces: Sequence[Piece], micro_tokens: int) -> list[list[Piece]]:
    """The pieces, longest first, in groups whose padded area (count x longest) stays within micro_tokens; at least one
    piece each. Similar lengths together, because recurrent layers pad a group to its longest; the longest of all by
    themselves, because equal lengths need no packing.
    """
    ordered = sorted(pieces, key=lambda p: p[0] - p[1])
    longest = ordered[0][1] - ordered[0][0]
    groups: list[list[Piece]] = []
    room, full = 0, False
    for piece in ordered:
        length = piece[1] - piece[0]
        if not room or (full and length < longest):
            groups.append([])
            room = max(1, micro_tokens // length)
            full = length == longest
        groups[-1].append(piece)
        room -= 1
    return groups
