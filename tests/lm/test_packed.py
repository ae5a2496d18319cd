"""Packed losses: the sum of what each document would have alone, and nothing of a neighbour in it."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from nonet.lm.held_out import measure
from nonet.lm.packed import Block, mtp_losses, predictions, token_losses

TOKENS = tiny.tokens(80, seed=4).numpy().astype(np.uint16)
MIXED = [(0, 17), (17, 19), (19, 52), (52, 69), (69, 80)]
EQUAL = [(0, 20), (20, 40), (60, 80)]
KINDS = ["hybrid", "k3", "gqa", "kimi_linear"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [MIXED, EQUAL], ids=["packed", "side by side"])
def test_together_is_one_by_one(kind, pieces):
    m = tiny.model(kind, mtp_layers=1, dtype=torch.float64)
    together = Block.of(TOKENS, pieces)
    losses_N, hidden = token_losses(m, together)
    further_N = mtp_losses(m, together, hidden)
    alone = [Block.of(TOKENS, [p]) for p in pieces]
    each = [token_losses(m, b) for b in alone]
    torch.testing.assert_close(losses_N, torch.cat([loss for loss, _ in each]), rtol=1e-5, atol=1e-5)
    ahead = [mtp_losses(m, b, h) for b, (_, h) in zip(alone, each, strict=True)]
    torch.testing.assert_close(further_N, torch.cat(ahead), rtol=1e-5, atol=1e-5)
    assert (len(losses_N), len(further_N)) == (predictions(pieces, 1), predictions(pieces, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_changes_nothing_to_the_last_bit(kind):
    m = tiny.model(kind, mtp_layers=1)
    one, other = TOKENS.copy(), TOKENS.copy()
    other[19:52] = (other[19:52] + 1) % 61
    found = []
    for tokens in (one, other):
        block = Block.of(tokens, MIXED)
        losses_N, hidden = token_losses(m, block)
        found.append((losses_N, mtp_losses(m, block, hidden)))
    ends = np.cumsum([b - a - 1 for a, b in MIXED])
    for k in (0, 1):
        a, b = (x[k] for x in found)
        ends = np.cumsum([max(0, y - x - 1 - k) for x, y in MIXED])
        mine = slice(int(ends[1]), int(ends[2]))
        assert torch.equal(a[: mine.start], b[: mine.start]) and torch.equal(a[mine.stop :], b[mine.stop :])
        assert not torch.equal(a[mine], b[mine])


def test_gradients_of_packed_and_separate_documents_agree():
    """Through both losses: the slow twin is one forward a document."""
    gradients = []
    for blocks in ([Block.of(TOKENS, MIXED)], [Block.of(TOKENS, [p]) for p in MIXED]):
        m = tiny.model("hybrid", mtp_layers=1, dtype=torch.float64)
        for b in blocks:
            losses_N, hidden = token_losses(m, b)
            (losses_N.sum() + mtp_losses(m, b, hidden).sum()).backward()
        gradients.append({n: p.grad for n, p in m.named_parameters()})
    for name, g in gradients[0].items():
        torch.testing.assert_close(g, gradients[1][name], rtol=1e-4, atol=1e-5)


def test_equal_pieces_lie_side_by_side_and_others_end_to_end():
    assert Block.of(TOKENS, EQUAL).starts is None
    packed = Block.of(TOKENS, MIXED)
    assert packed.starts == [0, 17, 19, 52, 69]
    assert packed.tokens_BT.shape == (1, 80) and packed.tokens_BT.dtype == torch.int64


def test_bits_per_byte_by_hand():
    m = tiny.model("hybrid")
    size = torch.arange(61) % 5
    found = measure(m, TOKENS, MIXED, size, micro_tokens=40)
    nats = bytes_ = 0.0
    with torch.no_grad():
        for a, b in MIXED:
            row = torch.from_numpy(TOKENS[a:b].astype(np.int64)).unsqueeze(0)
            logp = m.logits(m(row))[0, :-1].log_softmax(-1)
            nats -= float(logp.gather(1, row[0, 1:, None]).sum())
            bytes_ += float(size[row[0, 1:]].sum())
    assert found["bpb"] == pytest.approx(nats / np.log(2) / bytes_, rel=1e-5)
    assert found["tokens"] == predictions(MIXED, 1) and found["bytes"] == bytes_


def test_measuring_leaves_the_model_as_it_was():
    m = tiny.model("k3").train()
    measure(m, TOKENS, MIXED, torch.ones(61, dtype=torch.long), 40)
    assert m.training and all(e.gate.observed is None for e in m.experts())
