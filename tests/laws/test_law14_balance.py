"""Law 14: router load stays within the quantile bound (Kimi K3 report, section 2.3.3; k3 section 8.2)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nonet.ops.balance import BINS, QuantileHistogram, quantile_bias, sign_bias


def scores(tokens: int, experts: int, seed: int, skew: float = 2.0) -> Tensor:
    """Sigmoid scores of a router that prefers some experts."""
    gen = torch.Generator().manual_seed(seed)
    favour = torch.randn(experts, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * skew
    return torch.sigmoid(torch.randn(tokens, experts, generator=gen, dtype=torch.float64) + favour)


def max_violation(s_NE: Tensor, bias_E: Tensor, k: int) -> float:
    load = torch.bincount((s_NE + bias_E).topk(k, -1).indices.flatten(), minlength=s_NE.shape[1]).double()
    return float(load.max() / load.mean() - 1)


def observed(s_NE: Tensor, bias_E: Tensor, k: int, parts: int = 1) -> QuantileHistogram:
    seen = QuantileHistogram(bias_E, k)
    for part in s_NE.chunk(parts):
        seen.add(part, (part + bias_E).topk(k + 1, -1).values[:, k])
    return seen


def iterate(rule, experts: int, k: int, steps: int = 5) -> list[float]:
    """MaxVio of each step's own tokens under the bias that earlier steps left behind."""
    bias, out = torch.zeros(experts, dtype=torch.float64), []
    for step in range(steps):
        s = scores(256 * experts // k, experts, seed=100 + step)
        out.append(max_violation(s, bias, k))
        bias = rule(s, bias)
    return out


@pytest.mark.parametrize(("experts", "k"), [(16, 2), (64, 4)])
def test_a_skewed_router_is_balanced_within_five_steps(experts, k):
    exact = iterate(lambda s, b: quantile_bias(s, b, k), experts, k, 6)
    counted = iterate(lambda s, b: observed(s, b, k).bias(), experts, k, 6)
    signed = iterate(lambda s, b: sign_bias(b, observed(s, b, k).load_E, 1e-3), experts, k, 6)
    assert exact[0] > 1.5 and signed[5] > 1.5  # skewed at first, and the control has hardly moved
    assert exact[5] < 0.3 and counted[5] < 0.3


def test_the_histogram_is_the_exact_quantile_within_a_bin():
    for seed in range(5):
        s, bias = scores(3000, 24, seed), torch.randn(24, dtype=torch.float64) * 0.1
        seen = observed(s, bias, 3, parts=7)
        assert (seen.bias() - quantile_bias(s, bias, 3)).abs().max() <= 2 * seen.width
        assert seen.width == pytest.approx((float(bias.max() - bias.min()) + 2) / BINS)


def test_micro_batches_add_up_exactly():
    s, bias = scores(1000, 12, 0), torch.zeros(12, dtype=torch.float64)
    one, many = observed(s, bias, 2), observed(s, bias, 2, parts=9)
    assert torch.equal(one.bias(), many.bias()) and torch.equal(one.load_E, many.load_E)
    assert int(one.load_E.sum()) == 2 * 1000
    assert float(one.max_violation()) == pytest.approx(max_violation(s, bias, 2))


def test_the_bias_is_centred_and_never_touches_its_own_batch():
    s, start = scores(500, 8, 3), torch.zeros(8, dtype=torch.float64)
    seen = observed(s, start, 2)
    assert abs(float(seen.bias().mean())) < 1e-12
    assert not bool(start.any())
