"""What each form of on-policy distillation estimates, to the last digits: every sequence of a small world enumerated.

Three tokens, three steps, a free row of logits for every past, float64. Expectations are sums over all 27 sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nonet.rl.kl import full_kl, topk_kl
from nonet.rl.opd import returns

V, T = 3, 3
PASTS = [past for t in range(T) for past in product(range(V), repeat=t)]
INDEX = {past: i for i, past in enumerate(PASTS)}
WIDE = 1e9  # a clip that never acts
SEEDS = range(5)


def world(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of student, with gradient, and teacher: [pasts, V]."""
    noise = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(len(PASTS), V, generator=noise, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(True), teacher


def sequences(logp_SV: Tensor) -> Iterator[tuple[float, list[int], Tensor]]:
    """(probability, index of each past, log-prob of each token with gradient) of every sequence."""
    for y in product(range(V), repeat=T):
        states = [INDEX[y[:t]] for t in range(T)]
        logp_T = torch.stack([logp_SV[s, y[t]] for t, s in enumerate(states)])
        yield float(logp_T.detach().sum().exp()), [*states, *y], logp_T


def samples(student_SV: Tensor, advantage: Callable[[Tensor, list[int]], list[float]]) -> list[tuple[float, Tensor]]:
    """(probability, policy gradient of that sample) of every sequence, advantages given."""
    out = []
    for p, where, logp_T in sequences(student_SV.log_softmax(-1)):
        worth_T = torch.tensor(advantage(logp_T.detach(), where), dtype=torch.float64)
        (g,) = torch.autograd.grad((worth_T * logp_T).sum(), student_SV, retain_graph=True)
        out.append((p, g))
    return out


def mean(found: list[tuple[float, Tensor]]) -> Tensor:
    return torch.stack([p * g for p, g in found]).sum(0)


def variance(found: list[tuple[float, Tensor]]) -> float:
    centre = mean(found)
    return sum(p * float((g - centre).square().sum()) for p, g in found)


def opd(student: Tensor, teacher: Tensor, discount: float, r_max: float = WIDE) -> list[tuple[float, Tensor]]:
    """The estimator as opd.py makes it."""
    q_SV = teacher.log_softmax(-1)

    def advantage(logp_T: Tensor, where: list[int]) -> list[float]:
        taught = [float(q_SV[s, y]) for s, y in zip(where[:T], where[T:], strict=True)]
        return returns([q - p for q, p in zip(taught, logp_T.tolist(), strict=True)], r_max, discount)

    return samples(student, advantage)


def visits(student: Tensor) -> Tensor:
    """Probability of reaching each past, without gradient."""
    out = torch.zeros(len(PASTS), dtype=torch.float64)
    for p, where, _ in sequences(student.detach().log_softmax(-1)):
        out[where[:T]] += p
    return out


def state_gradient(student: Tensor, teacher: Tensor) -> Tensor:
    """Of the reverse KL in each state, states weighted as they are visited and held still."""
    kl = (visits(student) * full_kl(student.log_softmax(-1), teacher.log_softmax(-1))).sum()
    return torch.autograd.grad(kl, student)[0]


def sequence_gradient(student: Tensor, teacher: Tensor) -> Tensor:
    """Of the reverse KL between distributions over whole sequences."""
    q, total = teacher.log_softmax(-1), torch.zeros((), dtype=torch.float64)
    for _, where, logp_T in sequences(student.log_softmax(-1)):
        taught = sum(float(q[s, y]) for s, y in zip(where[:T], where[T:], strict=True))
        total = total + logp_T.sum().exp() * (logp_T.sum() - taught)
    return torch.autograd.grad(total, student)[0]


def assert_equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


# --------------------------------------------------------------------- the reward


@pytest.mark.parametrize("seed", SEEDS)
def test_discount_0_is_the_gradient_of_each_states_kl_with_the_states_held_still(seed):
    student, teacher = world(seed)
    assert_equal(mean(opd(student, teacher, 0.0)), -state_gradient(student, teacher))


@pytest.mark.parametrize("seed", SEEDS)
def test_discount_1_is_the_gradient_of_the_sequences_kl(seed):
    student, teacher = world(seed)
    assert_equal(mean(opd(student, teacher, 1.0)), -sequence_gradient(student, teacher))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_two_point_apart_and_what_comes_after_adds_variance(seed):
    student, teacher = world(seed)
    near, far = opd(student, teacher, 0.0), opd(student, teacher, 1.0)
    cosine = torch.cosine_similarity(mean(near).flatten(), mean(far).flatten(), dim=0)
    assert 0.5 < cosine < 0.999
    assert variance(far) > 1.5 * variance(near)


@pytest.mark.parametrize("seed", SEEDS)
def test_at_the_teacher_itself_both_vanish_sample_by_sample(seed):
    _, teacher = world(seed)
    student = teacher.clone().requires_grad_(True)
    for discount in (0.0, 1.0):
        assert all(float(g.abs().max()) < 1e-14 for _, g in opd(student, teacher, discount))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clip_biases_the_estimate_and_only_where_it_acts(seed):
    student, teacher = world(seed)
    ratios = (teacher.log_softmax(-1) - student.log_softmax(-1)).detach()
    exact, wide = (mean(opd(student, teacher, 0.0, r)) for r in (WIDE, float(ratios.abs().max())))
    assert_equal(exact, wide)
    narrow = mean(opd(student, teacher, 0.0, 0.3))
    assert float((narrow - exact).abs().max()) > 1e-2
    # As an estimate of -KL the clipped reward is biased: long tails to the teacher's disadvantage are cut.
    p = student.detach().log_softmax(-1).exp()
    assert float((p * ratios.clamp(-0.3, 0.3)).sum(-1).mean()) > float((p * ratios).sum(-1).mean())


# --------------------------------------------------------------------- KL in the wrong place


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_kl_over_tokens_used_as_an_advantage_teaches_nothing(k):
    """miles#2362, #2352: expected gradient exactly zero, whatever the teacher."""
    student, teacher = world(0)
    q = teacher.log_softmax(-1)

    def advantage(logp_T: Tensor, where: list[int]) -> list[float]:
        p = student.detach().log_softmax(-1)
        return [-float(topk_kl(p[s], q[s], k, "bucket")) for s in where[:T]]

    found = samples(student, advantage)
    assert max(float(g.abs().max()) for _, g in found) > 0.1  # each sample does push
    assert_equal(mean(found), torch.zeros_like(q))


def test_renormalised_over_one_token_a_kl_is_identically_zero():
    """Rethinking-OPD#15; the bucket and the generalised form see what is missing."""
    student, teacher = world(1)
    p, q = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    best = p.argmax(-1, keepdim=True)
    renormalised = [x.gather(-1, best).log_softmax(-1) for x in (p, q)]
    assert float((renormalised[0].exp() * (renormalised[0] - renormalised[1])).abs().max()) == 0
    assert float(topk_kl(p, q, 1, "bucket").min()) > 0
    assert float(topk_kl(p, q, 1, "generalised").min()) > 0


# --------------------------------------------------------------------- KL in the loss


def logits(seed: int, n: int = 7, w: int = 11) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(n, w, generator=noise, dtype=torch.float64) for _ in range(2))
    return p.requires_grad_(True), q


def test_the_full_kl_has_the_gradient_of_its_definition():
    student, teacher = logits(0)
    p, q = student.softmax(-1), teacher.softmax(-1)
    (wanted,) = torch.autograd.grad((p * (p / q).log()).sum(), student)
    (found,) = torch.autograd.grad(full_kl(student.log_softmax(-1), teacher.log_softmax(-1)).sum(), student)
    assert_equal(found, wanted)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_generalised_form_has_the_kls_gradient_over_its_support(k):
    """d/dtheta = sum over the support of grad p (log p - log q): no term that shrinks the support's own mass."""
    student, teacher = logits(1)
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    kept = p.detach().topk(k, -1).indices
    weight = (p - q).detach().gather(-1, kept)
    (wanted,) = torch.autograd.grad((p.exp().gather(-1, kept) * weight).sum(), student, retain_graph=True)
    (found,) = torch.autograd.grad(topk_kl(p, q, k, "generalised").sum(), student)
    assert_equal(found, wanted)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_bucket_is_a_kl_of_k_and_one_outcomes(k):
    student, teacher = logits(2)
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    kept = p.detach().topk(k, -1).indices

    def outcomes(x: Tensor) -> Tensor:
        inside = x.exp().gather(-1, kept)
        return torch.cat([inside, 1 - inside.sum(-1, keepdim=True)], -1)

    a, b = outcomes(p), outcomes(q)
    torch.testing.assert_close(topk_kl(p, q, k, "bucket"), (a * (a / b).log()).sum(-1), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("tail", ["bucket", "generalised"])
def test_at_the_teacher_a_truncated_kl_pulls_nowhere_but_a_bare_sum_drains_the_support(tail):
    """verl#5041, #7806, #6676; ms-swift#10079."""
    student, _ = logits(3)
    p = student.log_softmax(-1)
    q = p.detach().clone()
    (ours,) = torch.autograd.grad(topk_kl(p, q, 3, tail).sum(), student, retain_graph=True)
    assert_equal(ours, torch.zeros_like(q))
    kept = q.topk(3, -1).indices
    (bare,) = torch.autograd.grad((p.exp() * (p - q)).gather(-1, kept).sum(), student)
    moved = (student.detach() - 0.1 * bare).softmax(-1).gather(-1, kept).sum(-1)
    assert bool((moved < q.exp().gather(-1, kept).sum(-1)).all())


@pytest.mark.parametrize("tail", ["bucket", "generalised"])
def test_with_the_whole_vocabulary_the_truncated_kl_is_the_full_one(tail):
    student, teacher = logits(4)
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    for k in (11, 500):
        assert torch.equal(topk_kl(p, q, k, tail), full_kl(p, q))


@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from(["bucket", "generalised"]), st.floats(0, 40))
def test_no_form_is_ever_negative(seed, k, tail, scale):
    """trl#5990: terms clipped one by one can make the loss negative; sums of these never are."""
    p, q = ((x.detach() * scale).log_softmax(-1) for x in logits(seed))
    for found in (topk_kl(p, q, k, tail), full_kl(p, q)):
        assert bool(found.isfinite().all()) and float(found.min()) > -1e-12


def test_little_mass_outside_the_support_keeps_its_digits():
    """In float32, log(1 - mass inside) of a sure student would be log 0."""
    student = torch.tensor([[30.0, 1.0, 0.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0, 0.5, 0.0]])
    exact = topk_kl(student.double().log_softmax(-1), teacher.double().log_softmax(-1), 1, "bucket")
    found = topk_kl(student.log_softmax(-1), teacher.log_softmax(-1), 1, "bucket")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-7)
    (g,) = torch.autograd.grad(found.sum(), student)
    assert bool(g.isfinite().all())
