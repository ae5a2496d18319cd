"""What the torch drafter proposes: the argmax chain of the unrolled draft, whatever is cached and in whatever batch."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from tiny_draft import FORMS, batch_of, made
from torch import Tensor

from nonet.draft.cache import empty_state
from nonet.draft.drafter import TorchDrafter
from nonet.draft.model import Draft
from nonet.draft.unroll import unrolled
from nonet.engine.drafter import Choice, Drafter, Pairs
from nonet.engine.sampler import SamplingRows
from nonet.model.state import SequenceState
from nonet.ops.rng import stream_key


def choice(rows: int, position: int, temperature: float = 0.0) -> Choice:
    even = np.full(rows, 1.0)
    keys = np.array([stream_key(3, f"row {b}") for b in range(rows)], np.uint64)
    at = np.full(rows, position)
    return Choice(SamplingRows(even * temperature, np.zeros(rows, np.int64), even, keys, at))


def observed(drafter: TorchDrafter, ids: Tensor, state: SequenceState) -> None:
    """The target's features of every position of these rows, as if it had just computed them."""
    batch, (B, T) = batch_of(drafter.draft, ids), ids.shape
    at_BT = torch.arange(T).expand(B, T)
    pages_N, offsets_N = state.places(at_BT, None)
    drafter.observe(batch.features_BTF.flatten(0, 1), pages_N, offsets_N, state.memory)


def proposed(drafter: TorchDrafter, ids_BT: Tensor, state: SequenceState, entered: int, most: int) -> Tensor:
    """Proposals after the last of these tokens, positions up to `entered` being in the cache already."""
    rows = SequenceState(
        state.memory, state.table_BP, state.slot_B, torch.full_like(state.lengths_B, entered + 1), state.dense
    )
    new = ids_BT[:, entered + 1 :]
    counts = torch.full((len(ids_BT),), new.shape[1])
    pairs = Pairs(rows, new, counts, ids_BT.tolist())
    found = drafter.propose(pairs, most, choice(len(ids_BT), ids_BT.shape[1]))
    assert found.q_BKV is None
    assert found.counts_B.tolist() == [found.tokens_BK.shape[1]] * len(ids_BT)
    return found.tokens_BK


def argmax_chain(draft: Draft, ids_1T: Tensor, steps: int) -> list[int]:
    """By the unrolled forward: the features of ids, then the chain's own tokens as the true ones."""
    features = batch_of(draft, ids_1T[:, :-1]).features_BTF
    chain: list[int] = []
    for step in range(1, steps + 1):
        whole = torch.cat([ids_1T, torch.tensor([[*chain, 0]], dtype=torch.int64)[:, : len(chain)]], 1)
        batch = batch_of(draft, whole)  # features behind the first row's are not looked at
        batch.features_BTF[:, : features.shape[1]] = features
        with torch.no_grad():
            out = list(unrolled(draft, batch, step))[step - 1]
            best = int(draft.logits(out[:, ids_1T.shape[1] - 2]).argmax())
        chain.append(best if draft.d2t_W is None else int(draft.d2t_W[best]))
    return chain


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_proposals_are_the_unrolled_argmax_chain(form: str, pruned: bool):
    over = dict(d2t_W=torch.tensor([9, 60, 0, 31, 32, 33, 7, 44]), draft_vocab=8) if pruned else {}
    draft = made(form, torch.float64, **over)
    drafter: Drafter = TorchDrafter(draft, steps=5)
    assert isinstance(drafter, TorchDrafter)
    ids = tiny.tokens(2, 18)
    state = empty_state(draft, 2, 32)
    observed(drafter, ids[:, :-1], state)  # the last known token's own feature comes with its verification
    found = proposed(drafter, ids, state, entered=0, most=4)
    assert found.tolist() == [argmax_chain(draft, ids[b : b + 1], 4) for b in range(2)]


@pytest.mark.parametrize("form", FORMS)
def test_a_cached_prefix_and_a_recomputed_one_propose_the_same(form: str):
    """drafts 3.2, 14: entries of recycled states are gone once the true pairs are entered over them."""
    draft, ids = made(form, torch.float64), tiny.tokens(1, 24)
    drafter = TorchDrafter(draft, steps=4)
    state = empty_state(draft, 1, 32)
    observed(drafter, ids[:, :10], state)
    proposed(drafter, ids[:, :11], state, entered=0, most=4)  # leaves recycled entries at 11..13
    observed(drafter, ids[:, :23], state)
    resumed = proposed(drafter, ids, state, entered=10, most=4)
    fresh = empty_state(draft, 1, 32)
    observed(drafter, ids[:, :23], fresh)
    assert torch.equal(resumed, proposed(drafter, ids, fresh, entered=0, most=4))


def test_rows_of_unequal_length_do_not_disturb_each_other():
    draft = made("eagle3", torch.float64)
    drafter, ids = TorchDrafter(draft, steps=3), tiny.tokens(3, 20)
    state = empty_state(draft, 3, 32)
    observed(drafter, ids, state)
    counts = torch.tensor([19, 4, 11])
    pairs = Pairs(state, ids[:, 1:], counts, ids.tolist())
    found = drafter.propose(pairs, 3, choice(3, 0)).tokens_BK
    assert state.lengths_B.tolist() == [1, 1, 1]  # the engine counts, not the drafter
    for b, n in enumerate(counts.tolist()):
        alone = empty_state(draft, 1, 32)
        observed(drafter, ids[b : b + 1], alone)
        assert torch.equal(found[b], proposed(drafter, ids[b : b + 1, : n + 1], alone, entered=0, most=3)[0])


def test_sampled_drafts_come_with_what_they_were_drawn_from():
    """Frequencies over many streams agree with q; ids are the target's, q is over the draft's own words."""
    d2t = torch.tensor([9, 60, 0, 31])
    draft = made("eagle3", d2t_W=d2t, draft_vocab=4)
    drafter, rows = TorchDrafter(draft, steps=2), 4000
    ids = tiny.tokens(1, 6).expand(rows, 6)
    state = empty_state(draft, rows, 16)
    observed(drafter, ids[:, :-1], state)
    pairs = Pairs(state, ids[:, 1:], torch.full((rows,), 5), ids.tolist())
    found = drafter.propose(pairs, 2, choice(rows, 6, temperature=1.3))
    assert found.q_BKV is not None
    assert found.q_BKV.shape == (rows, 2, 4)
    assert torch.equal(found.vocabulary_V, d2t)
    q = found.q_BKV[0, 0]
    counts = torch.stack([(found.tokens_BK[:, 0] == t).sum() for t in d2t]).double()
    assert int(counts.sum()) == rows
    expected = q.double() / q.sum() * rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3 degrees, 0.1%


def test_one_hot_drafts_at_any_temperature():
    draft = made("eagle3")
    drafter, ids = TorchDrafter(draft, steps=2, sampled=False), tiny.tokens(2, 6)
    state = empty_state(draft, 2, 16)
    observed(drafter, ids[:, :-1], state)
    pairs = Pairs(state, ids[:, 1:], torch.full((2,), 5), ids.tolist())
    warm = drafter.propose(pairs, 2, choice(2, 6, temperature=1.0))
    assert warm.q_BKV is None
    assert torch.equal(warm.tokens_BK, drafter.propose(pairs, 2, choice(2, 6)).tokens_BK)
