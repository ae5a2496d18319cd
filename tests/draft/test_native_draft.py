"""The draft's chain in C against its torch twin."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from test_drafter import choice, observed
from tiny_draft import FORMS, made
from torch import Tensor, nn

from nonet import native
from nonet.draft.cache import empty_state
from nonet.draft.drafter import TorchDrafter
from nonet.draft.model import Draft
from nonet.draft.native import NativeDrafter, drafter_of
from nonet.engine import Engine
from nonet.engine.drafter import Pairs
from nonet.model.native_weights import Weights, rounded
from nonet.model.state import SequenceState
from nonet.types import Request, Sampling

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
NATIVE = [form for form in FORMS if form != "mtp rotated"]


def native_of(draft: Draft, steps: int, weights: str = "float32") -> NativeDrafter:
    drafter = NativeDrafter.of(draft, steps, weights=weights)
    assert drafter is not None
    return drafter


def entered(drafter: TorchDrafter, ids: Tensor, capacity: int = 48) -> SequenceState:
    """A memory in which the target's features of these rows are kept, and no pair is entered."""
    state = empty_state(drafter.draft, len(ids), capacity)
    for pool in state.layers[-1].values():  # what lies there before must not matter
        pool.normal_(generator=torch.Generator().manual_seed(1))
    observed(drafter, ids, state)
    return state


@torch.no_grad()
def chain(drafter: TorchDrafter, ids: Tensor, counts: Tensor, steps: int, state: SequenceState) -> list[Tensor]:
    """Logits behind the true pairs, then behind `steps` recycled ones with given tokens."""
    pairs = Pairs(state, ids[:, 1 : 1 + int(counts.max())], counts, ids.tolist())
    logits, out = drafter._first(pairs)
    found, state = [logits], replace(state, lengths_B=state.lengths_B + counts)
    for step in range(steps):
        logits, out = drafter._next(ids[:, step], drafter.draft.recycled(out), state)
        found.append(logits)
    return found


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("form", NATIVE)
def test_logits_and_entries_are_those_of_torch(form: str, together: bool, threads: int):
    draft, ids = made(form), tiny.tokens(5, 40)
    theirs, ours = TorchDrafter(draft, 4), native_of(draft, 4)
    ours.stack.together = together
    for counts in (torch.full((5,), 3), torch.tensor([39, 1, 17, 16, 5])):
        want_state, got_state = entered(theirs, ids), entered(theirs, ids)
        want = chain(theirs, ids, counts, 3, want_state)
        got = chain(ours, ids, counts, 3, got_state)
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g.log_softmax(-1), w.log_softmax(-1), atol=2e-5, rtol=0)
        for name, pool in want_state.layers[-1].items():
            torch.testing.assert_close(got_state.layers[-1][name], pool, atol=5e-5, rtol=1e-4)


OPTIONS: list[dict[str, Any]] = [
    {"norm_output": True},
    {"norm_before_residual": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: next(iter(o)))
def test_options_of_eagle3_are_kept(option: dict[str, Any]):
    draft, ids, counts = made("eagle3", **option), tiny.tokens(2, 12), torch.tensor([4, 7])
    theirs, ours, plain = TorchDrafter(draft, 4), native_of(draft, 4), native_of(made("eagle3"), 4)
    want = chain(theirs, ids, counts, 3, entered(theirs, ids))
    got = chain(ours, ids, counts, 3, entered(ours, ids))
    other = chain(plain, ids, counts, 3, entered(plain, ids))
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g.log_softmax(-1), w.log_softmax(-1), atol=1e-4, rtol=0)  # logits of tens
    assert not torch.allclose(want[-1], other[-1], atol=1e-3)


def twin(draft: Draft, weights: Weights) -> Draft:
    """The draft whose float32 weights are the numbers that copies in `weights` stand for."""
    out = copy.deepcopy(draft)
    modules = (out.mtp if draft.config.form == "mtp" else out.layer).named_modules()
    for name, module in modules:
        if isinstance(module, nn.Linear) and not name.endswith("kv_b_proj"):
            module.weight.data = rounded(module.weight.data, weights)
        for key in ("w1", "w2", "w3"):
            if isinstance(p := getattr(module, key, None), nn.Parameter):
                p.data = rounded(p.data, weights)
    return out


@pytest.mark.parametrize("weights", ["bf16", "int8", "mxfp4"])
@pytest.mark.parametrize("form", NATIVE)
def test_weights_in_fewer_bits_are_a_draft_with_rounded_weights(form: str, weights: Weights):
    draft, ids, counts = made(form), tiny.tokens(3, 12), torch.tensor([4, 7, 1])
    reference = TorchDrafter(twin(draft, weights), 4)
    reference._head_WD = rounded(reference._head_WD if draft.config.form == "mtp" else draft.lm_head.weight, weights)
    ours = native_of(draft, 4, weights)
    want = chain(reference, ids, counts, 2, entered(reference, ids))
    got = chain(ours, ids, counts, 2, entered(ours, ids))
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g.log_softmax(-1), w.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("form", NATIVE)
def test_the_same_tokens_are_proposed(form: str, pruned: bool):
    over: dict[str, Any] = dict(d2t_W=torch.tensor([9, 60, 0, 31, 32, 33, 7, 44]), draft_vocab=8) if pruned else {}
    draft, ids = made(form, **over), tiny.tokens(4, 30)
    theirs, ours = TorchDrafter(draft, 5), native_of(draft, 5)
    state = entered(theirs, ids)
    counts = torch.tensor([3, 19, 8, 1])
    pairs = Pairs(state, ids[:, 1:20], counts, ids.tolist())
    for temperature in (0.0, 1.0):
        want = theirs.propose(pairs, 4, choice(4, 20, temperature))
        got = ours.propose(pairs, 4, choice(4, 20, temperature))
        assert torch.equal(got.tokens_BK, want.tokens_BK)
        assert torch.equal(got.counts_B, want.counts_B)
        assert (got.q_BKV is None) == (want.q_BKV is None) == (temperature == 0)
        if got.q_BKV is not None and want.q_BKV is not None:
            torch.testing.assert_close(got.q_BKV, want.q_BKV, atol=2e-5, rtol=0)
    assert state.lengths_B.tolist() == [1] * 4


@pytest.mark.parametrize("weights", ["float32", "bf16"])
@pytest.mark.parametrize("form", NATIVE)
def test_new_weights_are_seen_at_once(form: str, weights: Weights):
    draft, ids, counts = made(form), tiny.tokens(2, 8), torch.tensor([4, 7])
    ours = native_of(draft, 3, weights)
    before = [x.clone() for x in chain(ours, ids, counts, 2, entered(ours, ids))]
    with torch.no_grad():
        for p in (*draft.parameters(), draft.target.lm_head.weight):
            p.mul_(1.2)
    fresh = native_of(draft, 3, weights)
    state = entered(ours, ids)
    assert not any(map(torch.equal, before, chain(ours, ids, counts, 2, state)))
    for a, b in zip(chain(ours, ids, counts, 2, state), chain(fresh, ids, counts, 2, state), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["mtp of K3", "eagle3"])
def test_the_engine_writes_what_it_writes_without_a_draft(form: str):
    """C computes a few tokens as it computes one: greedy answers agree to the last token, whatever was drafted."""
    draft = made(form)
    written = []
    for drafter in (native_of(draft, 4), None):
        engine = Engine(draft.target, drafter=drafter)
        for i in range(5):
            engine.submit(Request(f"r{i}", tuple(range(1, 4 + i)), 24, (), Sampling(temperature=0)))
        written.append({c.id: c.tokens for c in engine.run()})
    assert written[0] == written[1]
    assert len(written[0]) == 5


def test_what_c_does_not_know_stays_with_torch():
    for draft in (made("mtp rotated"), made("eagle3", torch.float64)):
        assert NativeDrafter.of(draft, 4) is None
        assert type(drafter_of(draft, 4)) is TorchDrafter
