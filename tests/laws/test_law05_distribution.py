"""Law 5 in distribution: what is written with sampled drafts is drawn from the target, whatever the draft."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import tiny
import torch
from drafters import Echo
from torch import Tensor

from nonet.engine import Engine
from nonet.engine.drafter import Choice, Proposal
from nonet.engine.sampler import Distributions, Edit, SamplingRows
from nonet.engine.verification import Verified, verify
from nonet.model import Model
from nonet.ops.rng import uniforms
from nonet.types import Request, Sampling

W = 12
PRUNED = torch.tensor([9, 0, 4, 7, 2])
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.6": Sampling(0.6),
    "top-k": Sampling(top_k=4),
    "top-p": Sampling(top_p=0.7),
    "all": Sampling(0.9, top_k=8, top_p=0.9, min_p=0.05),
    "edited": Sampling(1.0, repetition_penalty=1.5, presence_penalty=0.6, logit_bias=((3, 2.0),)),
}
every_sampling = pytest.mark.parametrize("name", SAMPLINGS)
every_draft = pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])


def draws(name: str) -> int:
    """100,000; edits are made one by one in Python."""
    return 10_000 if name == "edited" else 100_000


def tables(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of the target and of the draft after each of W tokens, the draft's near the target's."""
    generator = torch.Generator().manual_seed(seed)
    target_WW = torch.randn(W, W, generator=generator) * 2
    return target_WW, target_WW + torch.randn(W, W, generator=generator)


def rows(sampling: Sampling, count: int, drafted_NK: Tensor, first: int = 1) -> SamplingRows:
    """Of `count` streams after the prompt (first,), T = K+1 rows each, as feed.sampling_through makes them."""
    T = drafted_NK.shape[1] + 1
    streams = np.stack([np.arange(count), np.full(count, 77)], 1).astype(np.uint64)
    edits = {}
    if Edit.wanted(sampling):
        edits = {
            n * T + k: Edit(sampling, (first,), drafted)
            for k in range(T)
            for n, drafted in enumerate(drafted_NK[:, :k].tolist())
        }
    return SamplingRows(
        temperature=np.full(count * T, sampling.temperature),
        top_k=np.full(count * T, sampling.top_k),
        top_p=np.full(count * T, sampling.top_p),
        min_p=np.full(count * T, sampling.min_p),
        keys=np.repeat(streams, T, axis=0),
        positions=np.tile(np.arange(1, T + 1, dtype=np.uint64), count),
        edits=edits,
    )


@cache
def played(sampling: Sampling, pruned: bool, count: int, first: int = 1) -> tuple[Verified, Proposal]:
    """`count` drafts of two tokens after the token `first`, verified: a Markov chain, target's and draft's."""
    (target_WW, draft_WW), vocabulary = tables(), PRUNED if pruned else None
    draft_WV = draft_WW if vocabulary is None else draft_WW[:, vocabulary]
    last_N, tokens, qs = torch.full((count,), first), [], []
    choice = Choice(rows(sampling, count, torch.zeros(count, 0, dtype=torch.long)))
    for k in range(2):
        index_N, q_NV = choice.pick(draft_WV[last_N], k)
        last_N = index_N if vocabulary is None else vocabulary[index_N]
        tokens.append(last_N)
        qs.append(q_NV)
    drafted_NK = torch.stack(tokens, 1)
    before_NT = torch.cat([torch.full((count, 1), first), drafted_NK], 1)
    proposal = Proposal(drafted_NK, torch.full((count,), 2), torch.stack(qs, 1), vocabulary)
    return verify(target_WW[before_NT], proposal, rows(sampling, count, drafted_NK, first)), proposal


def law(sampling: Sampling, before: tuple[int, ...]) -> Tensor:
    """p of the token after `before`, by the plain path."""
    none = torch.zeros(1, 0, dtype=torch.long)
    how = rows(sampling, 1, none)
    if Edit.wanted(sampling):
        how.edits = {0: Edit(sampling, before[:1], before[1:])}
    return Distributions.of(tables()[0][before[-1]][None], how).shaped_NW[0].double().exp()


def assert_drawn_from(tokens: Tensor, p_W: Tensor) -> None:
    """Chi-square below four standard deviations (by Wilson and Hilferty's cube root); what has no mass never appears.
    Cells under 5 expected are merged.
    """
    n = len(tokens)
    counts = torch.bincount(tokens, minlength=len(p_W)).double()
    assert not counts[p_W == 0].any()
    expected = n * p_W / p_W.sum()
    rare = expected < 5
    pairs = [(counts[rare].sum(), expected[rare].sum()), *zip(counts[~rare], expected[~rare], strict=True)]
    alive = [(c, e) for c, e in pairs if e > 0]
    statistic, freedom = float(sum((c - e) ** 2 / e for c, e in alive)), len(alive) - 1
    if freedom:
        spread = 2 / (9 * freedom)
        assert ((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread) < 4


@every_sampling
@every_draft
def test_verified_tokens_are_drawn_from_the_target(name, pruned):
    """The first token; the second after each first one that stood; the bonus after each pair."""
    sampling = SAMPLINGS[name]
    found, _ = played(sampling, pruned, draws(name))
    assert_drawn_from(found.tokens_BT[:, 0], law(sampling, (1,)))
    first_N, both = found.tokens_BT[:, 0], found.accepted_B == 2
    often = [t for t, n in enumerate(torch.bincount(first_N[found.accepted_B >= 1]).tolist()) if n > 200]
    assert often
    for token in often:
        after = (found.accepted_B >= 1) & (first_N == token)
        assert_drawn_from(found.tokens_BT[after, 1], law(sampling, (1, token)))
    pairs_N = first_N * W + found.tokens_BT[:, 1]
    pair = int(torch.mode(pairs_N[both]).values)
    assert_drawn_from(found.tokens_BT[both & (pairs_N == pair), 2], law(sampling, (1, pair // W, pair % W)))


@every_sampling
@every_draft
def test_acceptance_is_the_sum_of_minima(name, pruned):
    sampling, n = SAMPLINGS[name], draws(name)
    found, proposal = played(sampling, pruned, n)
    p_W, q_W = law(sampling, (1,)), proposal.q_at(torch.zeros(n, dtype=torch.long), W)[0]
    expected, share = float(torch.minimum(p_W, q_W).sum()), float((found.accepted_B >= 1).double().mean())
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / n) + 1e-9


@every_sampling
def test_log_probs_are_those_of_the_target_after_and_before_the_transform(name):
    sampling = SAMPLINGS[name]
    found, _ = played(sampling, False, 300)
    for b in range(300):
        for k in range(int(found.accepted_B[b]) + 1):
            before = (1, *found.tokens_BT[b, :k].tolist())
            token = int(found.tokens_BT[b, k])
            assert float(found.logprobs_BT[b, k]) == pytest.approx(float(law(sampling, before)[token].log()), abs=1e-5)
            raw = tables()[0][before[-1]].log_softmax(-1)[token]
            assert float(found.raw_logprobs_BT[b, k]) == pytest.approx(float(raw), abs=1e-6)


def test_a_draft_that_is_the_target_is_never_rejected_and_one_beside_it_always():
    target_WW, _ = tables()
    how = rows(Sampling(top_k=3), 1000, torch.zeros(1000, 1, dtype=torch.long))
    p_W = law(Sampling(top_k=3), (1,))
    logits = target_WW[1].expand(1000, 2, W)
    inside = torch.multinomial(p_W, 1000, True, generator=torch.manual_seed(0))[:, None]
    ones = torch.ones(1000, dtype=torch.long)
    assert int(verify(logits, Proposal(inside, ones, p_W.expand(1000, 1, W)), how).accepted_B.sum()) == 1000
    outside = p_W.argmin().expand(1000, 1)
    q_W = torch.zeros(W).index_fill(0, outside[0], 1.0)
    found = verify(logits, Proposal(outside, ones, q_W.expand(1000, 1, W)), how)
    assert int(found.accepted_B.sum()) == 0
    assert_drawn_from(found.tokens_BT[:, 0], p_W)


def test_counts_say_how_much_of_a_proposal_is_real():
    """Rows with less proposed than their batch: what is behind the count is never written."""
    found, proposal = played(Sampling(), False, 2000)
    fewer = Proposal(proposal.tokens_BK, torch.arange(2000) % 3, proposal.q_BKV)
    before_NT = torch.cat([torch.ones(2000, 1, dtype=torch.long), proposal.tokens_BK], 1)
    again = verify(tables()[0][before_NT], fewer, rows(Sampling(), 2000, proposal.tokens_BK))
    assert torch.equal(again.accepted_B, found.accepted_B.minimum(fewer.counts_B))
    plain = uniforms(*_streams(2000))
    cdf_W = law(Sampling(), (1,)).cumsum(0)
    none = fewer.counts_B == 0
    assert again.tokens_BT[none, 0].tolist() == torch.searchsorted(cdf_W, torch.from_numpy(plain)[none]).tolist()


def _streams(count: int) -> tuple[np.ndarray, np.ndarray]:
    how = rows(Sampling(), count, torch.zeros(count, 0, dtype=torch.long))
    return how.keys, how.positions


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([4, 1, 6, 0])], ids=["whole", "pruned"])
def test_the_engine_writes_with_sampled_drafts_what_the_model_says(vocabulary):
    """12,000 answers of three tokens in a vocabulary of seven, against all 343 probabilities by fresh forwards."""
    words, count, sampling = 7, 12_000, Sampling(1.0, top_p=0.95, seed=5)
    m = tiny.model("hybrid", vocab=words, layers=2, mixers=("kda", "mla"))
    drafter = Echo(m, steps=2, sampled=True, vocabulary_V=vocabulary, checked=False)
    engine = Engine(m, drafter=drafter, prefix_cache=False)
    for i in range(count):
        engine.submit(Request(str(i), (1, 5, 2), 3, stream=str(i), sampling=sampling))
    written = torch.tensor([c.tokens for c in engine.run()])
    figures = engine.figures()
    assert 0.2 < figures["draft_accepted_total"] / figures["draft_proposed_total"] < 0.95
    expected = torch.zeros(words**3, dtype=torch.float64)
    for a, b, c in product(range(words), repeat=3):
        p = 1.0
        for before, token in (((), a), ((a,), b), ((a, b), c)):
            p *= float(after(m, (1, 5, 2, *before))[token])
        expected[(a * words + b) * words + c] = p
    assert_drawn_from((written[:, 0] * words + written[:, 1]) * words + written[:, 2], expected)


@cache
def after(m: Model, before: tuple[int, ...]) -> Tensor:
    """p of the next token at top-p 0.95."""
    with torch.no_grad():
        logits = m.logits(m(torch.tensor([before]))[:, -1])
    how = rows(Sampling(1.0, top_p=0.95), 1, torch.zeros(1, 0, dtype=torch.long))
    return Distributions.of(logits, how).shaped_NW[0].double().exp()
