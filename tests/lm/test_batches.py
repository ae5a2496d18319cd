"""Rows: every token once an epoch, no piece across a document, the same step always the same tokens."""

from __future__ import annotations

import corpora
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.lm.batches import Long, Packed, laid_out, micro_batches
from nonet.lm.corpus import Corpus
from nonet.types import UserError

ALL = np.arange(len(corpora.corpus().documents_M))


def inside_a_document(c: Corpus, piece: tuple[int, int]) -> bool:
    i = int(np.searchsorted(c.documents_M["end"], piece[0], "right"))
    return c.starts_M[i] <= piece[0] < piece[1] <= c.documents_M["end"][i]


@pytest.mark.parametrize(("context", "rows"), [(8, 3), (32, 4), (100, 2), (1000, 1)])
def test_an_epoch_is_every_token_once_but_for_a_remainder_below_one_batch(context, rows):
    c = corpora.corpus()
    data = Packed(c, ALL, context, rows, seed=1)
    seen = np.zeros(len(c.tokens_N), int)
    for step in range(data.batches):
        pieces = data(step)
        assert sum(b - a for a, b in pieces) <= rows * context
        assert all(inside_a_document(c, p) and 2 <= p[1] - p[0] <= context for p in pieces)
        for a, b in pieces:
            seen[a:b] += 1
    assert seen.max() == 1
    # dropped: the last partial batch, and single tokens, of which a cut makes at most two
    assert (seen == 0).sum() <= rows * context + 2 * data.batches * rows


@given(st.integers(0, 3), st.integers(0, 40))
def test_a_batch_is_a_function_of_seed_and_step(seed, step):
    c = corpora.corpus()
    one, other = Packed(c, ALL, 32, 2, seed), Packed(c, ALL, 32, 2, seed)
    other(99)  # whatever was asked before
    assert one(step) == other(step)
    assert Packed(c, ALL, 32, 2, seed + 1)(step) != one(step)


def test_epochs_differ_in_order():
    data = Packed(corpora.corpus(), ALL, 32, 2, 0)
    assert data(0) != data(data.batches)


def test_rows_are_cut_only_at_their_ends():
    """Inside a row a new piece begins only where a document begins; a cut document goes on in the tape's next row."""
    c = corpora.corpus()
    data = Packed(c, ALL, 40, 1, seed=2)
    data(0)
    starts, continued = set(c.starts_M.tolist()), 0
    last_end = None
    for row in range(data.batches):
        pieces = list(data.row(row))
        for i, (a, _) in enumerate(pieces):
            if a not in starts:
                assert i == 0
                continued += last_end == a
        last_end = pieces[-1][1]
    assert continued > 5


def test_a_batch_is_drawn_from_many_documents():
    """Rows that follow each other on the tape are of one document; a batch of them would be about one thing."""
    c = corpora.corpus()
    data = Packed(c, ALL, 8, 16, seed=2)
    documents = [len({int(np.searchsorted(c.documents_M["end"], a, "right")) for a, _ in data(s)}) for s in range(8)]
    assert min(documents) >= 10


def test_long_rows_are_whole_and_from_long_documents_only():
    c = corpora.corpus()
    data = Long(c, ALL, 64, 2, seed=3)
    found = [p for step in range(len(data.starts) // 2) for p in data(step)]
    assert len(set(found)) == len(found) > 4
    for a, b in found:
        i = int(np.searchsorted(c.documents_M["end"], a, "right"))
        assert b - a == 64 and (a - c.starts_M[i]) % 64 == 0 and b <= c.documents_M["end"][i]
    assert data(0) == Long(c, ALL, 64, 2, seed=3)(0) != data(len(data.starts) // 2)


def test_the_shortest_document_decides_between_packed_and_long():
    c = corpora.corpus()
    assert isinstance(laid_out(c, ALL, 32, 2, 0, 0), Packed)
    assert isinstance(laid_out(c, ALL, 32, 2, 32, 0), Long)
    some = laid_out(c, ALL, 64, 2, 40, 0)
    assert isinstance(some, Packed) and (c.lengths_M[some.documents] >= 40).all()


@pytest.mark.parametrize(
    ("context", "rows", "shortest", "sentence"),
    [
        (64, 10**6, 0, "training tokens are fewer than one batch of 1000000 x 64"),
        (100000, 1, 100000, "no document has min_document = 100000 tokens"),
        (64, 10**6, 64, "whole rows of 64 tokens"),
    ],
)
def test_too_little_data_is_a_sentence(context, rows, shortest, sentence):
    with pytest.raises(UserError, match=sentence):
        laid_out(corpora.corpus(), ALL, context, rows, shortest, 0)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=60), st.integers(8, 200))
def test_micro_batches_keep_every_piece_within_the_padded_area(lengths, budget):
    ends = np.cumsum(lengths).tolist()
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    groups = micro_batches(pieces, budget)
    assert sorted(p for g in groups for p in g) == pieces
    for g in groups:
        longest = max(b - a for a, b in g)
        assert len(g) == 1 or len(g) * longest <= budget
        assert longest < max(lengths) or len({b - a for a, b in g}) == 1
