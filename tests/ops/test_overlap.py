"""The draft's losses by their definition: values, gradients, the inputs that break other implementations, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nonet.ops.overlap import DraftLoss, Head, overlap, overlap_definition
from nonet.ops.overlap_rules import KINDS, Measures, fallback_share
from nonet.types import UserError

WIDE = torch.float64


def logits(T: int, W: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(T, W, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def through_heads(draft_TW: Tensor, target_TW: Tensor, d2t: Tensor | None = None, **options) -> DraftLoss:
    """`overlap` of given logits: hidden states are the logits, heads the identity."""
    heads = [Head(z, torch.eye(z.shape[1], dtype=z.dtype)) for z in (draft_TW, target_TW)]
    return overlap(heads[0], heads[1], d2t, **options)


def torch_blocks(draft_TW: Tensor, target_TW: Tensor, d2t: Tensor | None = None, **options) -> DraftLoss:
    return through_heads(draft_TW, target_TW, d2t, native=False, **options)


def c_blocks(draft_TW: Tensor, target_TW: Tensor, d2t: Tensor | None = None, **options) -> DraftLoss:
    return through_heads(draft_TW.float(), target_TW.float(), d2t, **options)


FORMS = [overlap_definition, torch_blocks, c_blocks]


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.3, 1.7)])
def test_exp_of_minus_the_loss_is_the_acceptance_of_rejection_sampling(temperatures):
    z_q, z_p = logits(5, 40, seed=1), logits(5, 40, seed=2)
    q, p = (z_q / temperatures[0]).softmax(-1), (z_p / temperatures[1]).softmax(-1)
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=torch.Generator().manual_seed(3))
    kept = (p / q).clamp(max=1).gather(1, drawn).mean(-1)  # a drawn token is accepted with min(1, p / q)
    out = overlap_definition(z_q, z_p, temperatures=temperatures)
    torch.testing.assert_close((-out.rows_T).exp(), out.alpha_T)
    torch.testing.assert_close(out.alpha_T, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(out.alpha_T, kept, atol=5e-3, rtol=0)


def test_tv_kl_and_hybrid_in_a_whole_vocabulary_are_their_textbook_forms():
    z_q, z_p = logits(5, 40, seed=1), logits(5, 40, seed=2)
    q, p = z_q.softmax(-1), z_p.softmax(-1)
    tv, kl = (p - q).abs().sum(-1) / 2, (p * (p / q).log()).sum(-1)
    share = (-2.0 * (1 - tv)).exp()
    for kind, want in [("tv", tv), ("kl", kl), ("hybrid", share * kl + (1 - share) * tv)]:
        torch.testing.assert_close(overlap_definition(z_q, z_p, kind=kind, eta=2.0).rows_T, want)


@pytest.mark.parametrize("form", FORMS)
def test_a_pruned_vocabulary_keeps_the_targets_whole_mass(form):
    """3.1 (4) of the drafts notes: renormalised over 200 of 2,000 tokens, an acceptance of .6 reads .73."""
    z_p = -1.1 * torch.arange(1, 2001, dtype=WIDE).log()[None]  # Zipf
    d2t = torch.arange(200)
    z_q = z_p[:, d2t] + logits(1, 200, 0.5)
    out = form(z_q, z_p, d2t)
    p, q = z_p.softmax(-1)[:, d2t], z_q.softmax(-1)
    want = float(torch.minimum(p, q).sum())
    assert float(out.alpha_T) == pytest.approx(want, abs=1e-5)
    assert want < 0.9 * float(torch.minimum(p / p.sum(), q).sum())


def test_tokens_outside_the_draft_vocabulary_count_as_distance():
    """tv is the total variation over all tokens, kl the part of KL that a draft can still win."""
    z_q, z_p, d2t = logits(6, 10, seed=1), logits(6, 30, seed=2), torch.randperm(30)[:10]
    q = torch.zeros(6, 30, dtype=WIDE).index_copy(1, d2t, z_q.softmax(-1))
    p = z_p.softmax(-1)
    torch.testing.assert_close(overlap_definition(z_q, z_p, d2t, kind="tv").rows_T, (p - q).abs().sum(-1) / 2)
    assert float(overlap_definition(z_q, z_p, d2t, kind="kl").rows_T.min()) > 0
    best = overlap_definition(z_p[:, d2t], z_p, d2t, kind="kl").rows_T
    torch.testing.assert_close(best, torch.zeros_like(best), atol=1e-12, rtol=0)


# ------------------------------------------------------------------ the five inputs that break other implementations


def slope(form, z_q: Tensor, z_p: Tensor, d2t: Tensor | None = None, **options) -> tuple[float, Tensor]:
    z_q = z_q.clone().requires_grad_()
    out = form(z_q, z_p, d2t, **options)
    out.mean.backward()
    assert z_q.grad is not None and bool(z_q.grad.isfinite().all())
    return float(out.mean.detach()), z_q.grad


@pytest.mark.parametrize("form", FORMS)
def test_disjoint_by_a_gap_of_200_gives_a_loss_of_200_and_the_whole_gradient(form):
    """3.1 (1) and (3): NaN elsewhere, or a token of no loss at all."""
    z_q, z_p = torch.zeros(1, 64, dtype=WIDE), torch.zeros(1, 64, dtype=WIDE)
    z_q[0, 7], z_p[0, 3] = 200.0, 400.0
    loss, grad = slope(form, z_q, z_p)
    assert loss == pytest.approx(200, abs=1e-4)
    assert (float(grad[0, 3]), float(grad[0, 7])) == (pytest.approx(-1, abs=1e-4), pytest.approx(1, abs=1e-4))


@pytest.mark.parametrize("form", FORMS)
def test_equal_gaps_of_200_on_both_sides_still_teach_the_missing_token(form):
    """All 64 tokens share the overlap, so its own gradient is a 64th; KL's is added."""
    z_q, z_p = torch.zeros(1, 64, dtype=WIDE), torch.zeros(1, 64, dtype=WIDE)
    z_q[0, 7], z_p[0, 3] = 200.0, 200.0
    loss, grad = slope(form, z_q, z_p)
    assert loss == pytest.approx(200 - math.log(64), abs=1e-3)
    assert float(grad.abs().sum()) > 0.1 and int(grad.argmax()) == 7


@pytest.mark.parametrize("form", FORMS[:1])
def test_a_uniform_draft_of_a_large_vocabulary_is_taught(form):
    """3.1 (2): a clamp at 1e-5 is above the cold start's 1/V = 6.6e-6."""
    z_q, z_p = torch.zeros(1, 151_936, dtype=WIDE), torch.zeros(1, 151_936, dtype=WIDE)
    z_p[0, 3] = 60.0
    loss, grad = slope(form, z_q, z_p)
    assert loss == pytest.approx(math.log(151_936), abs=1e-4)
    assert float(grad.abs().sum()) == pytest.approx(2, abs=1e-3) and int(grad.argmin()) == 3


@pytest.mark.parametrize("form", FORMS)
def test_confident_and_wrong_by_20_gives_20_and_a_gradient_of_2(form):
    """3.1 (2), its second input."""
    z_q, z_p = torch.zeros(1, 320, dtype=WIDE), torch.zeros(1, 320, dtype=WIDE)
    z_q[0, 7], z_p[0, 3] = 20.0, 60.0
    loss, grad = slope(form, z_q, z_p)
    assert loss == pytest.approx(20, abs=1e-4)
    assert float(grad.abs().sum()) == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_masked_rows_change_no_mean_of_any_term(form, kind):
    """3.1 (5): KL averaged over all rows beside acceptance over valid ones scales with the padding."""
    z_q, z_p, mask = logits(40, 20, seed=1), logits(40, 20, seed=2), torch.arange(40) % 10 == 3
    alone = form(z_q[mask], z_p[mask], kind=kind)
    out = form(z_q, z_p, weights_T=mask, kind=kind)
    torch.testing.assert_close(out.mean, alone.mean)
    torch.testing.assert_close(out.rows_T[mask], alone.rows_T)
    assert not out.rows_T[~mask].any() and not out.alpha_T[~mask].any()


# --------------------------------------------------------------------------------------------------------- fall-back


def plateau() -> tuple[Tensor, Tensor]:
    """Half of the target's mass on a token that the draft has forgotten, at an acceptance of one half."""
    z_q, z_p = torch.full((1, 16), -100.0, dtype=WIDE), torch.full((1, 16), -100.0, dtype=WIDE)
    z_q[0, 2] = z_p[0, 2] = z_p[0, 5] = 0.0
    return z_q, z_p


@pytest.mark.parametrize("form", FORMS)
def test_on_a_plateau_the_value_stays_and_the_gradient_is_kls(form):
    z_q, z_p = plateau()
    pure, nothing = slope(form, z_q, z_p, fallback=0.0)
    loss, grad = slope(form, z_q, z_p)
    assert pure == loss == pytest.approx(math.log(2), abs=1e-6)
    assert float(nothing.abs().sum()) < 1e-20
    torch.testing.assert_close(grad, slope(form, z_q, z_p, kind="kl")[1])
    assert float(grad[0, 5]) == pytest.approx(-0.5, abs=1e-6)


@given(st.integers(0, 10**6), st.sampled_from([0.3, 2.0, 12.0, 40.0]), st.booleans())
def test_the_size_of_the_gradient_and_the_bound_that_the_fallback_rests_on(seed, scale, pruned):
    z_q, z_p = logits(4, 12, scale, seed), logits(4, 12, scale, seed + 1)
    d2t = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:7] if pruned else None
    z_q = (z_q[:, :7] if pruned else z_q).requires_grad_()
    out = overlap_definition(z_q, z_p, d2t, fallback=0.0)
    size = 4 * torch.autograd.grad(out.mean, z_q)[0].abs().sum(-1)
    p, q = z_p.softmax(-1) if d2t is None else z_p.softmax(-1)[:, d2t], z_q.detach().softmax(-1)
    q_S = q.where(q < p, 0).sum(-1)
    torch.testing.assert_close(size, 2 * q_S / out.alpha_T * (1 - q_S), atol=1e-9, rtol=1e-6)
    kl = 4 * torch.autograd.grad(overlap_definition(z_q, z_p, d2t, kind="kl").mean, z_q)[0].abs().sum(-1)
    assert bool((kl >= 2 * (p.sum(-1) - out.alpha_T) - 1e-9).all())


def test_the_fallback_fades_in_below_its_border_and_never_where_nothing_is_missing():
    def share(short: float, alpha: float, mass: float) -> float:
        row = [torch.tensor([x], dtype=WIDE) for x in (math.log(alpha), short, mass - alpha, mass, 0.0)]
        return float(fallback_share(Measures(*row), 0.1))

    assert [share(s, 0.5, 1.0) for s in (0.2, 0.0514, 0.0253, 0.0)] == pytest.approx([0, 0, 0.5, 1], abs=2e-3)
    assert share(0.0, 0.7, 0.7) == 0.0


def test_a_target_outside_the_draft_vocabulary_is_infinite_without_a_gradient():
    z_p = torch.full((1, 8), -torch.inf, dtype=WIDE)
    z_p[0, 7] = 0.0
    for kind in KINDS:
        loss, grad = slope(overlap_definition, torch.zeros(1, 3, dtype=WIDE), z_p, torch.arange(3), kind=kind)
        assert loss == {"overlap": math.inf, "tv": 1.0, "kl": 0.0, "hybrid": 0.0}[kind]
        assert not grad.any()


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_with_enough_of_every_token_is_left_alone(form):
    """Most of the target's mass is out of reach: q >= p everywhere, though q is not p / m."""
    z_q, z_p = logits(50, 5, 0.3, seed=4), logits(50, 60, 0.3, seed=5)
    loss, grad = slope(form, z_q, z_p, torch.arange(5))
    assert loss > 1 and not grad.any()


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights_T": torch.zeros(3)}, "weights: all 3 rows are masked, so there is nothing to learn"),
        ({"weights_T": torch.tensor([1.0, -1.0, 0.0])}, "weights: some are negative or not finite"),
        ({"weights_T": torch.ones(4)}, "weights: shape (4,); needs one number for each of 3 rows"),
        ({"d2t_W": None}, "d2t: missing, and the draft has 4 tokens where the target has 9"),
        (
            {"d2t_W": torch.tensor([0, 1, 1, 8])},
            "d2t: id 1 stands for 2 draft tokens; needs ids, each once, not offsets",
        ),
        ({"d2t_W": torch.tensor([0, 1, 2, 9])}, "d2t: ids from 0 to 9; the target has 0 to 8"),
        ({"d2t_W": torch.arange(3)}, "d2t: torch.int64 of shape (3,); needs 4 integers"),
        ({"kind": "jsd"}, "loss 'jsd': not one of overlap, tv, kl, hybrid"),
        ({"eta": -1.0}, "eta = -1.0: must be 0 (off) or positive and finite"),
        ({"fallback": math.nan}, "fallback = nan"),
        ({"draft": Head(torch.ones(3, 5), torch.ones(4, 6))}, "draft: hidden (3, 5) and head (4, 6)"),
        ({"draft": Head(torch.ones(2, 5), torch.ones(4, 5))}, "overlap: 2 rows of the draft against 3 of the target"),
        ({"draft": Head(torch.ones(3, 5).double(), torch.ones(4, 5))}, "draft: hidden torch.float64 on cpu, head"),
        ({"target": Head(torch.ones(3, 5), torch.ones(9, 5), 0.0)}, "target: temperature 0.0; must be positive"),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_sentence(changed, said):
    good = {
        "draft": Head(torch.ones(3, 5), torch.ones(4, 5)),
        "target": Head(torch.ones(3, 5), torch.ones(9, 5)),
        "d2t_W": torch.tensor([8, 0, 3, 1]),
    }
    overlap(**good)
    with pytest.raises(UserError) as caught:
        overlap(**{**good, **changed})
    assert said in str(caught.value)
