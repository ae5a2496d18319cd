"""K25 against its formula: values, gradients, the window, the square that is never masked."""

from __future__ import annotations

import math

import pytest
import torch

from nonet.rl.objective import K25

LOW, HIGH, TAU = 0.5, 2.0, 0.3
CASES = [
    (-1.0, -1.0, 1.0),
    (-1.2, -1.0, -0.7),
    (-0.5, -1.0, 0.4),
    (-2.5, -1.0, 1.0),
    (-0.1, -1.5, -1.0),
    (-3.0, -3.1, 0.0),
]


def gradient(objective: K25, logp: list[float], behaviour: list[float], advantage: list[float]) -> torch.Tensor:
    leaf = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    loss = objective(leaf, *(torch.tensor(x, dtype=torch.float64) for x in (behaviour, advantage)))
    return torch.autograd.grad(loss, leaf)[0]


def test_value_and_gradient_are_the_closed_form():
    logp, behaviour, advantage = (list(column) for column in zip(*CASES, strict=True))
    value, slopes = 0.0, []
    for l, m, a in CASES:
        rho = math.exp(l - m)
        inside = LOW <= rho <= HIGH
        value -= (rho * a if inside else 0) - TAU * (l - m) ** 2
        slopes.append(-((rho * a if inside else 0) - 2 * TAU * (l - m)))
    objective = K25(LOW, HIGH, TAU)
    loss = objective(*(torch.tensor(x, dtype=torch.float64) for x in (logp, behaviour, advantage)))
    assert loss.item() == pytest.approx(value, rel=1e-12)
    assert gradient(objective, logp, behaviour, advantage).tolist() == pytest.approx(slopes, rel=1e-12)


@pytest.mark.parametrize("log_ratio", [math.log(LOW) - 0.01, math.log(HIGH) + 0.01, -3.0, 3.0, -60.0, 60.0])
@pytest.mark.parametrize("advantage", [-2.0, -0.1, 0.1, 2.0])
def test_outside_the_window_only_the_square_pulls_whatever_the_sign_of_the_advantage(log_ratio, advantage):
    """Unlike PPO's clip, which limits one side per sign: with A < 0 a large ratio is unbounded there."""
    slope = gradient(K25(LOW, HIGH, TAU), [-5.0 + log_ratio], [-5.0], [advantage])
    assert slope.item() == pytest.approx(2 * TAU * log_ratio)
    assert gradient(K25(LOW, HIGH, 0.0), [-5.0 + log_ratio], [-5.0], [advantage]).item() == 0


@pytest.mark.parametrize("log_ratio", [math.log(LOW) + 1e-6, -0.2, 0.0, 0.3, math.log(HIGH) - 1e-6])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_inside_the_window_the_gain_acts_whatever_the_sign_of_the_advantage(log_ratio, advantage):
    slope = gradient(K25(LOW, HIGH, 0.0), [-5.0 + log_ratio], [-5.0], [advantage])
    assert slope.item() == pytest.approx(-math.exp(log_ratio) * advantage)


def test_at_ratio_one_the_regulariser_has_no_gradient():
    """A one-update on-policy run cannot show any effect of tau; see the learner's tests for stale data."""
    logp, advantage = [-0.3, -2.0, -7.0], [1.0, -1.0, 0.5]
    with_tau, without = (gradient(K25(LOW, HIGH, tau), logp, logp, advantage) for tau in (9.0, 0.0))
    assert torch.equal(with_tau, without)
    assert with_tau.tolist() == [-a for a in advantage]


def test_the_loss_is_a_sum_so_that_the_caller_owns_the_denominator():
    objective = K25(LOW, HIGH, TAU)
    columns = [torch.tensor(c) for c in zip(*CASES, strict=True)]
    each = sum(objective(*(c[i : i + 1] for c in columns)) for i in range(len(CASES)))
    torch.testing.assert_close(objective(*columns), each)
    assert objective(*(c[:0] for c in columns)).item() == 0


def test_no_gradient_flows_into_behaviour_or_advantage():
    inputs = [torch.tensor([-1.0], requires_grad=True) for _ in range(3)]
    K25(LOW, HIGH, TAU)(inputs[0], inputs[1].detach(), inputs[2].detach()).backward()
    assert inputs[1].grad is inputs[2].grad is None
    assert inputs[0].grad is not None
