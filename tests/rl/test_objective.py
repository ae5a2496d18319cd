"""Each objective against its formula, one token at a time, and against what each is known to get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nonet.rl.config import RLConfig
from nonet.rl.objective import CISPO, DPPO, GSPO, K25, PPO, TIS, IcePop, Mirror, Objective, Tokens

EVERY: list[Any] = [
    K25(tau=0.3), K25(tau=0.3, anchor="proximal"), PPO(), PPO(anchor="proximal"), TIS(), IcePop(),
    CISPO(ratio_high=1.5), GSPO(clip_low=0.1, clip_high=0.15), DPPO(tau=0.2),
    Mirror(tau=0.2), Mirror(tau=0.2, anchor="behaviour"),
]  # fmt: skip
NAMES = [f"{type(o).__name__}-{getattr(o, 'anchor', '')}" for o in EVERY]
every = pytest.mark.parametrize("objective", EVERY, ids=NAMES)


def tokens(logp, behaviour, advantage, row=None, proximal=None) -> Tokens:
    wide = [torch.tensor(x, dtype=torch.float64) for x in (logp, behaviour, advantage)]
    wide[0].requires_grad_()
    rows = torch.tensor(row if row is not None else [0] * len(logp))
    old = wide[0].detach().clone() if proximal is None else torch.tensor(proximal, dtype=torch.float64)
    return Tokens(wide[0], wide[1], wide[2], rows, old)


def slopes(objective: Objective, given: Tokens) -> Tensor:
    return torch.autograd.grad(objective(given), given.logp_N)[0]


def drawn(seed: int, lengths: tuple[int, ...] = (3, 1, 6, 2), spread: float = 0.6) -> Tokens:
    noise, n = torch.Generator().manual_seed(seed), sum(lengths)
    mu = -3 * torch.rand(n, dtype=torch.float64, generator=noise) - 0.01
    old = mu + spread * torch.randn(n, dtype=torch.float64, generator=noise)
    logp = (old + spread * torch.randn(n, dtype=torch.float64, generator=noise)).requires_grad_()
    advantage = torch.randn(n, dtype=torch.float64, generator=noise)
    return Tokens(logp, mu, advantage, torch.tensor([r for r, k in enumerate(lengths) for _ in range(k)]), old)


# ------------------------------------------------------------- the formulas, one token or row at a time


def naive(objective: Objective, t: Tokens) -> Tensor:
    """The loss by its formula, token by token; `float` of a tensor is the stop-gradient."""
    assert t.proximal_N is not None
    each = list(zip(t.logp_N, t.behaviour_N, t.advantage_N, t.proximal_N, strict=True))
    rows: dict[int, list[tuple[Tensor, ...]]] = {}
    for r, token in zip(t.row_N.tolist(), each, strict=True):
        rows.setdefault(r, []).append(token)
    if isinstance(objective, GSPO | Mirror):
        gains = [FORMULAS[type(objective)](objective, row) for row in rows.values()]
    else:
        gains = [FORMULAS[type(objective)](objective, *token) for token in each]
    return -torch.stack(gains).sum()


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, x.new_tensor(low)), x.new_tensor(high))


def k25(o: K25, logp, mu, a, old) -> Tensor:
    rho = (logp - mu).exp()
    anchor = mu if o.anchor == "behaviour" else old
    return rho * a * (o.ratio_low <= float(rho.detach()) <= o.ratio_high) - o.tau * (logp - anchor) ** 2


def surrogate(o: PPO, r: Tensor, a: Tensor) -> Tensor:
    return torch.minimum(r * a, clip(r, 1 - o.clip_low, 1 + o.clip_high) * a)


def ppo(o: PPO, logp, mu, a, old) -> Tensor:
    if o.anchor == "behaviour":
        return surrogate(o, (logp - mu).exp(), a)
    return math.exp(old - mu) * surrogate(o, (logp - old).exp(), a)


def tis(o: TIS, logp, mu, a, old) -> Tensor:
    return min(math.exp(old - mu), o.cap) * surrogate(o, (logp - old).exp(), a)


def icepop(o: IcePop, logp, mu, a, old) -> Tensor:
    weight = math.exp(old - mu)
    return weight * (o.ratio_low <= weight <= o.ratio_high) * surrogate(o, (logp - old).exp(), a)


def cispo(o: CISPO, logp, mu, a, old) -> Tensor:
    return min(max(math.exp(float(logp.detach()) - mu), o.ratio_low), o.ratio_high) * a * logp


def gspo(o: GSPO, row: list) -> Tensor:
    """min(s A, clip(s) A) with one A a row, whose gradient through s the test compares."""
    s = torch.stack([logp - mu for logp, mu, _, _ in row]).mean().exp()
    a = row[0][2]
    return torch.minimum(s * a, clip(s, 1 - o.clip_low, 1 + o.clip_high) * a)


def dppo(o: DPPO, logp, mu, a, old) -> Tensor:
    moved = math.exp(float(logp.detach())) - math.exp(mu)
    dropped = moved > o.moved_high if a > 0 else moved < -o.moved_low
    return (logp - mu).exp() * a * (not dropped) - o.tau * (logp - mu) ** 2


def mirror(o: Mirror, row: list) -> Tensor:
    gain = torch.stack([a * logp for logp, _, a, _ in row]).sum()
    drift = torch.stack([logp - (mu if o.anchor == "behaviour" else old) for logp, mu, _, old in row]).sum()
    return gain - o.tau / 2 * drift**2


FORMULAS: dict[type, Callable[..., Tensor]] = {
    K25: k25, PPO: ppo, TIS: tis, IcePop: icepop, CISPO: cispo, GSPO: gspo, DPPO: dppo, Mirror: mirror,
}  # fmt: skip


@every
@pytest.mark.parametrize("seed", range(8))
def test_value_and_gradient_are_those_of_the_formula_in_float64(objective, seed):
    t = drawn(seed)
    if isinstance(objective, GSPO):  # of one advantage a row
        t = t._replace(advantage_N=t.row_sum(t.advantage_N))
    expected, found = naive(objective, t), objective(t)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes(objective, t), torch.autograd.grad(expected, t.logp_N)[0], rtol=1e-11, atol=1e-12)


def test_the_cases_reach_every_branch():
    """Else the comparison above would say nothing about windows and clips."""
    for objective in EVERY:
        shares = [objective.clipped(drawn(seed)).double().mean().item() for seed in range(8)]
        assert isinstance(objective, Mirror) or 0 < sum(shares) / 8 < 1, objective


@every
def test_gradients_agree_with_finite_differences(objective):
    """Except where a formula stops a gradient: there the slope is that of the weight held still."""
    if isinstance(objective, CISPO):
        return
    t = drawn(3)
    if isinstance(objective, GSPO):
        objective, t = FrozenGSPO(**objective.model_dump()), t._replace(advantage_N=t.row_sum(t.advantage_N))
    assert torch.autograd.gradcheck(lambda logp: objective(t._replace(logp_N=logp)), (t.logp_N,), eps=1e-7)


class FrozenGSPO(GSPO):
    """GSPO with its gradient through s itself, as the paper first writes it."""

    def __call__(self, tokens: Tokens) -> Tensor:
        s_N = tokens.row_mean(tokens.logp_N - tokens.behaviour_N).exp()
        gain_N = torch.minimum(
            s_N * tokens.advantage_N, s_N.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantage_N
        )
        return -(gain_N / tokens.row_sum(torch.ones_like(gain_N))).sum()


# ---------------------------------------------------------------------------- laws of every objective


@every
def test_the_loss_is_a_sum_over_rows_so_that_the_caller_owns_the_denominator(objective):
    t = drawn(1)
    parts = [t._replace(**{f: getattr(t, f)[t.row_N == r] for f in FIELDS})._replace(row_N=None) for r in range(4)]
    parts = [p._replace(row_N=torch.zeros(len(p.logp_N), dtype=torch.long)) for p in parts]
    torch.testing.assert_close(sum(objective(p) for p in parts), objective(t))
    nothing = t._replace(**{f: getattr(t, f)[:0] for f in (*FIELDS, "row_N")})
    assert objective(nothing).item() == 0
    assert objective.clipped(nothing).shape == (0,)


FIELDS = ("logp_N", "behaviour_N", "advantage_N", "proximal_N")


@every
def test_at_ratio_one_every_objective_is_the_plain_policy_gradient(objective):
    """On equal weights nothing is clipped and no regulariser acts: -A a token, or its share of a row.

    So a one-update on-policy run cannot show any effect of tau; see the learner's tests for stale data.
    """
    logp, advantage, row = [-0.3, -2.0, -7.0], [1.0, -1.0, 0.5], [0, 0, 1]
    t = tokens(logp, logp, advantage, row)
    share = [0.5, 0.5, 1.0] if isinstance(objective, GSPO) else [1.0] * 3
    assert slopes(objective, t).tolist() == pytest.approx([-a * s for a, s in zip(advantage, share, strict=True)])
    assert not objective.clipped(t).any()


@every
def test_no_gradient_flows_into_anything_but_the_policy(objective):
    t = drawn(2)
    leaves = {f: getattr(t, f).detach().clone().requires_grad_() for f in ("behaviour_N", "advantage_N", "proximal_N")}
    detached = {f: x.detach() for f, x in leaves.items()}
    objective(t._replace(**detached)).backward()
    assert t.logp_N.grad is not None
    assert all(x.grad is None for x in leaves.values())


@every
@given(seed=st.integers(0, 10**6))
def test_the_order_of_rows_changes_nothing(objective, seed):
    """verl#1129."""
    t = drawn(seed % 97)
    order = torch.randperm(len(t.logp_N), generator=torch.Generator().manual_seed(seed))
    shuffled = t._replace(**{f: getattr(t, f)[order] for f in (*FIELDS, "row_N")})
    torch.testing.assert_close(objective(shuffled), objective(t))
    torch.testing.assert_close(
        slopes(objective, t)[order], torch.autograd.grad(objective(shuffled), t.logp_N)[0][order]
    )


def test_needs_and_denominators_are_stated():
    needs = {type(o).__name__ + getattr(o, "anchor", ""): o.needs for o in EVERY}
    assert {n for n, need in needs.items() if need == {"proximal"}} == {
        "K25proximal", "PPOproximal", "TISproximal", "IcePopproximal", "Mirrorproximal",
    }  # fmt: skip
    assert {type(o) for o in EVERY if o.per == "sequence"} == {GSPO, Mirror}


def test_a_recipe_chooses_by_name_and_sets_the_knobs():
    assert RLConfig().chosen_objective == K25()
    assert RLConfig.model_validate({"objective": "tis", "tis": {"cap": 3}}).chosen_objective == TIS(cap=3)


# -------------------------------------------------------------------------------- K25's window


@pytest.mark.parametrize("log_ratio", [math.log(0.5) - 0.01, math.log(2) + 0.01, -3.0, 3.0, -60.0, 60.0])
@pytest.mark.parametrize("advantage", [-2.0, -0.1, 0.1, 2.0])
def test_outside_the_window_only_the_square_pulls_whatever_the_sign_of_the_advantage(log_ratio, advantage):
    """Unlike PPO's clip, which limits one side per sign: with A < 0 a large ratio is unbounded there."""
    t = tokens([-5.0 + log_ratio], [-5.0], [advantage])
    assert slopes(K25(tau=0.3), t).item() == pytest.approx(2 * 0.3 * log_ratio)
    assert slopes(K25(tau=0.0), t).item() == 0
    assert K25().clipped(t).all()


@pytest.mark.parametrize("log_ratio", [math.log(0.5) + 1e-6, -0.2, 0.0, 0.3, math.log(2) - 1e-6])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_inside_the_window_the_gain_acts_whatever_the_sign_of_the_advantage(log_ratio, advantage):
    """The bounds are on the ratio: were 0.5 one of its logarithm, every token of an unchanged policy were masked."""
    t = tokens([-5.0 + log_ratio], [-5.0], [advantage])
    assert slopes(K25(tau=0.0), t).item() == pytest.approx(-math.exp(log_ratio) * advantage)
    assert not K25().clipped(t).any()


def test_the_anchor_moves_the_square_alone():
    t = tokens([-1.0], [-1.5], [0.7], proximal=[-1.2])
    gain = -math.exp(0.5) * 0.7
    assert slopes(K25(tau=0.3), t).item() == pytest.approx(gain + 2 * 0.3 * 0.5)
    assert slopes(K25(tau=0.3, anchor="proximal"), t).item() == pytest.approx(gain + 2 * 0.3 * 0.2)


# -------------------------------------------------------------------- what the others are known for


def test_ppo_leaves_a_large_ratio_of_a_bad_token_unbounded():
    huge = tokens([-0.1, -0.1], [-6.0, -6.0], [-1.0, 1.0])
    bad, good = slopes(PPO(), huge).tolist()
    assert bad == pytest.approx(math.exp(5.9))
    assert good == 0


def test_the_decoupled_clip_is_measured_from_the_iterations_start_and_weighted_by_staleness():
    t = tokens([-1.0], [-2.0], [1.0], proximal=[-1.1])
    assert slopes(PPO(), t).item() == 0  # e past 1.28
    assert slopes(PPO(anchor="proximal"), t).item() == pytest.approx(-math.exp(0.9) * math.exp(0.1))


def test_tis_truncates_and_icepop_drops_what_lies_far_from_the_sampler():
    t = tokens([-1.0, -1.0], [-3.0, -1.5], [1.0, 1.0], proximal=[-1.0, -1.0])
    assert slopes(TIS(cap=2.0), t).tolist() == pytest.approx([-2.0, -math.exp(0.5)])
    assert slopes(IcePop(ratio_high=5.0), t).tolist() == pytest.approx([0.0, -math.exp(0.5)])
    assert TIS().clipped(t).tolist() == IcePop().clipped(t).tolist() == [True, False]


def test_cispo_keeps_every_tokens_gradient():
    t = tokens([-0.1, -0.1], [-6.0, -6.0], [-1.0, 1.0])
    assert slopes(CISPO(ratio_high=4.0), t).tolist() == pytest.approx([4.0, -4.0])


def test_dppo_lets_a_rare_token_multiply_and_stops_a_likely_one():
    t = tokens([-3.0, -0.1], [-6.0, -0.5], [1.0, 1.0])  # 20-fold to 5%; 1.5-fold to 90%
    assert DPPO().clipped(t).tolist() == [False, True]
    assert DPPO().clipped(t._replace(advantage_N=-t.advantage_N)).tolist() == [False, False]


@pytest.mark.parametrize("length", [100, 2000])
def test_a_small_bias_a_token_does_not_mask_a_long_row(length):
    """trl#4772: 0.012 a token is a product of 3.3 after 100 tokens and e^24 after 2,000; a cap of 3 drops every row."""
    t = tokens([-1.0 + 0.012] * length, [-1.0] * length, [1.0] * length)
    assert math.exp(0.012 * length) > 3.0
    for objective in (K25(), PPO(), TIS(), IcePop(), CISPO(), DPPO()):
        assert objective.clipped(t).double().mean() == 0, objective
    assert GSPO.ratio(t).tolist() == pytest.approx([math.exp(0.012)] * length)


def test_gspo_is_not_multiplied_by_length():
    """trl#3823: the loss of a row grew with its tokens."""
    loss = [GSPO()(tokens([-1.0] * n, [-1.0] * n, [1.0] * n)).item() for n in (1, 10, 1000)]
    assert loss == pytest.approx([-1.0] * 3)


def test_one_row_does_not_reach_another_through_a_mean():
    """Soup#723: masked tokens leaked through centring. Rows meet nowhere in a sequence-level objective."""
    t = drawn(5)
    other = t.row_N == 2
    moved = t._replace(**{f: getattr(t, f).masked_fill(other, -9.0) for f in ("behaviour_N", "proximal_N")})
    for objective in (GSPO(clip_low=0.9, clip_high=1e9), Mirror()):
        assert torch.equal(slopes(objective, t)[~other], slopes(objective, moved)[~other])
        assert not torch.equal(slopes(objective, t)[other], slopes(objective, moved)[other])


def test_mirror_descents_square_grows_with_length_squared():
    """The pitfall of a square of a sum: the same bias a token pulls 100 times harder in a row 100 times as long."""
    pull = [
        slopes(Mirror(tau=1.0), tokens([-1 + 0.012] * n, [-1.0] * n, [0.0] * n, proximal=[-1.0] * n))[0].item()
        for n in (10, 1000)
    ]
    assert pull == pytest.approx([0.12, 12.0])
