"""Sampling: the drawn distribution is the one the log-probs describe, and a row never notices its batch-mates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nonet.engine import sampler
from nonet.engine.sampler import Edit, SamplingRows, sample, top
from nonet.ops.rng import stream_key
from nonet.types import Sampling, UserError

W = 12


def rows(n: int, temperature=1.0, top_k=0, top_p=1.0, stream: str = "s") -> SamplingRows:
    def full(x) -> np.ndarray:
        return np.broadcast_to(np.asarray(x), (n,)).copy()

    keys = np.array([stream_key(0, f"{stream}{i}") for i in range(n)], np.uint64)
    return SamplingRows(full(temperature), full(top_k), full(top_p), keys, np.full(n, 3, np.uint64))


def logits(n: int = 1, seed: int = 0, width: int = W) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * 2


def slow_distribution(logits_W: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition: scale, keep the k likeliest, then the fewest likeliest that reach top_p, renormalise each
    time.
    """
    p = [math.exp(x / temperature) for x in logits_W.tolist()]
    p = [x / sum(p) for x in p]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[: top_k or len(p)]
    total = sum(p[i] for i in kept)
    while len(kept) > 1 and sum(p[i] for i in kept[:-1]) / total >= top_p:
        kept.pop()
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


SETTINGS = [
    (1.0, 0, 1.0),
    (0.6, 0, 1.0),
    (2.0, 0, 1.0),
    (1.0, 3, 1.0),
    (1.0, 0, 0.7),
    (0.8, 5, 0.6),
    (1.3, 1, 1.0),
    (1.0, 99, 0.01),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_draws_follow_the_slow_definition(temperature, top_k, top_p):
    """Chi-square of 20,000 draws against the slow definition; forbidden tokens never appear."""
    n = 20_000
    expected = slow_distribution(logits()[0], temperature, top_k, top_p)
    tokens, _, _ = sample(logits().expand(n, W), rows(n, temperature, top_k, top_p))
    counts = torch.bincount(tokens, minlength=W).tolist()
    assert all(c == 0 for c, p in zip(counts, expected, strict=True) if p == 0)
    alive = [(c, n * p) for c, p in zip(counts, expected, strict=True) if p > 0]
    statistic, freedom = sum((c - e) ** 2 / e for c, e in alive), len(alive) - 1
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_logprobs_are_those_of_the_drawn_token_after_and_before_the_transform(temperature, top_k, top_p):
    n = 200
    tokens, after, before = sample(logits().expand(n, W), rows(n, temperature, top_k, top_p))
    shaped = slow_distribution(logits()[0], temperature, top_k, top_p)
    plain = slow_distribution(logits()[0], 1.0, 0, 1.0)
    for token, a, b in zip(tokens.tolist(), after.tolist(), before.tolist(), strict=True):
        assert a == pytest.approx(math.log(shaped[token]), abs=1e-5)
        assert b == pytest.approx(math.log(plain[token]), abs=1e-5)


@given(temperature=st.floats(0.2, 3), top_k=st.integers(0, W + 3), top_p=st.floats(0.02, 1), seed=st.integers(0, 10**6))
def test_the_transform_keeps_exactly_the_tokens_of_the_slow_definition(temperature, top_k, top_p, seed):
    row = logits(seed=seed)
    shaped = sampler.shape(row.log_softmax(-1), rows(1, temperature, top_k, top_p))[0]
    expected = torch.tensor(slow_distribution(row[0], temperature, top_k, top_p))
    torch.testing.assert_close(shaped.exp(), expected, rtol=1e-3, atol=1e-6)


def test_greedy_takes_the_likeliest_token_with_logprob_zero():
    for seed in range(20):
        tokens, after, before = sample(logits(3, seed), rows(3, temperature=0.0))
        assert torch.equal(tokens, logits(3, seed).argmax(-1))
        assert after.tolist() == [0.0] * 3
        expected = logits(3, seed).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(before, expected)


def test_ties_are_broken_by_the_lowest_id():
    flat = torch.zeros(1, W)
    assert sample(flat, rows(1, temperature=0.0))[0].item() == 0
    tokens, after, _ = sample(flat.expand(500, W), rows(500, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 2}
    assert after.exp().tolist() == pytest.approx([1 / 3] * 500, abs=1e-6)
    tokens, after, _ = sample(flat.expand(500, W), rows(500, top_p=0.5))
    assert set(tokens.tolist()) == set(range(6))
    assert after.exp().tolist() == pytest.approx([1 / 6] * 500, abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 1e-300, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_mass(u, monkeypatch):
    """u near 1 times a total that rounds below 1 must not run past the last token that can be drawn."""
    monkeypatch.setattr(sampler, "uniforms", lambda keys, positions: np.full(len(positions), u))
    row = torch.full((1, W), -torch.inf)
    row[0, 2], row[0, 5], row[0, 7] = 0.0, 1.0, -60.0
    token, logprob, _ = sample(row, rows(1))
    assert token.item() in ({2} if u < 0.5 else {5, 7})
    assert math.isfinite(logprob.item())
    token, logprob, _ = sample(row, rows(1, top_k=2))
    assert token.item() == (2 if u < 0.5 else 5)
    assert math.isfinite(logprob.item())


@pytest.mark.parametrize("width", [7, 64, 100, 640, 49_152])
def test_draws_are_found_in_blocks_as_in_the_whole(width):
    """Against one running sum in float64: the same tokens, but where a draw falls within rounding of a border."""
    g = torch.Generator().manual_seed(width)
    mass = (torch.randn(300, width, generator=g) * 4).log_softmax(-1).exp()
    mass[::3, : width // 2] = 0
    draws = torch.rand(300, generator=g, dtype=torch.float64)
    found = sampler.invert(mass, draws.numpy())
    ends = mass.double().cumsum(-1)
    share = draws * ends[:, -1]
    assert (mass.gather(1, found.unsqueeze(1)) > 0).all()
    above = ends.gather(1, found.unsqueeze(1)).squeeze(1) - share
    below = above - mass.double().gather(1, found.unsqueeze(1)).squeeze(1)
    assert (above > -1e-6).all() and (below < 1e-6).all()
    assert (found == torch.searchsorted(ends, share.unsqueeze(1), right=True).squeeze(1)).float().mean() > 0.99


def test_a_row_does_not_notice_its_batch_mates_to_the_last_bit():
    """Law 18 at its root: a plain row keeps its bits beside rows with other settings."""
    choices = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.8), (0.0, 0, 1.0), (0.7, 4, 0.8)]
    temperature, top_k, top_p = (list(column) for column in zip(*choices, strict=True))
    n = len(choices)
    for seed in range(30):
        table = logits(n, seed, width=101)
        together = rows(n, temperature, top_k, top_p)
        result = sample(table, together)
        for i in range(n):
            one = SamplingRows(
                *(getattr(together, f)[i : i + 1] for f in ("temperature", "top_k", "top_p", "keys", "positions"))
            )
            alone = sample(table[i : i + 1], one)
            for a, b in zip(alone, result, strict=True):
                assert a[0].item() == b[i].item(), (seed, choices[i])


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("temperature", math.nan)],
)
def test_impossible_settings_are_one_sentence(field, value):
    with pytest.raises(UserError, match=f"^{field} = {value}: must"):
        Sampling(**{field: value})


def test_logits_that_are_not_finite_are_refused_with_a_sentence():
    rows = SamplingRows(np.ones(2), np.zeros(2), np.ones(2), np.zeros((2, 2), np.uint64), np.zeros(2, np.uint64))
    with pytest.raises(UserError, match="logits are not finite"):
        sample(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]), rows)


# ------------------------------------------------------------------------- min-p, penalties, biases


def edited(how: Sampling, prompt: list[int], written: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """The logits before and after."""
    before = logits(seed=seed)[0]
    return before, Edit(how, prompt, written).apply(before)


def test_min_p_keeps_tokens_by_their_share_of_the_likeliest():
    some = logits(seed=5).expand(3, W) / 2
    many = rows(3)
    many.min_p = np.array([0.0, 0.2, 0.9])
    shaped = sampler.shape(some.log_softmax(-1), many).exp()
    for b, share in enumerate(many.min_p):
        p = some[b].softmax(-1)
        kept = p >= share * p.max()
        torch.testing.assert_close(shaped[b], torch.where(kept, p, 0) / p[kept].sum())
    assert bool((shaped[2] > 0).sum() < (shaped[1] > 0).sum() < W)


def test_presence_and_frequency_look_at_the_completion_alone():
    before, after = edited(Sampling(presence_penalty=0.5, frequency_penalty=0.25), [1, 2, 2], [3, 4, 4, 4])
    want = before.clone()
    want[3] -= 0.75
    want[4] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(after, want)


def test_repetition_looks_at_prompt_and_completion_and_shrinks_towards_zero_or_below():
    before, after = edited(Sampling(repetition_penalty=2.0), [0, 1, 1], [2])
    for i in range(W):
        x = float(before[i])
        assert float(after[i]) == pytest.approx((x / 2 if x > 0 else x * 2) if i < 3 else x)
    assert {float(before[i]) > 0 for i in range(3)} == {True, False}


def test_biases_are_added_last_and_the_raw_logprob_knows_nothing_of_them():
    how, one = Sampling(0.0, logit_bias=((7, 50.0), (8, -100.0))), logits()
    biased = rows(1, temperature=0.0)
    biased.edits = {0: Edit(how, [1], [])}
    token, after, raw = sample(one, biased)
    assert int(token) == 7 and float(after) == 0
    torch.testing.assert_close(raw[0], one[0].log_softmax(-1)[7])


def test_an_edited_row_leaves_its_batch_mates_alone_to_the_last_bit():
    some = logits(3)
    plain, mixed = rows(3), rows(3)
    mixed.edits = {1: Edit(Sampling(presence_penalty=1.0, repetition_penalty=1.5), [1, 2], [3])}
    for a, b in zip(sample(some, plain), sample(some, mixed), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_top_is_likeliest_first():
    one = logits()[0]
    found = top(one, 3)
    assert [t for t, _ in found] == one.argsort(descending=True)[:3].tolist()
    assert [x for _, x in found] == pytest.approx(one.log_softmax(-1).sort(descending=True).values[:3].tolist())
