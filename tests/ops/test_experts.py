"""Grouped experts against the loop that defines them, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from nonet.ops.experts import experts, experts_grouped, experts_loop


def act(gate, up):
    return F.silu(gate) * up


def case(N: int, E: int, K: int, D: int = 12, width: int = 20, dtype=torch.float32, crowd: bool = False):
    gen = torch.Generator().manual_seed(N * 100 + E)
    x = torch.randn(N, D, generator=gen, dtype=dtype)
    chosen = torch.rand(N, E, generator=gen).topk(K, -1).indices
    if crowd:  # everyone picks the same experts, the others stay empty
        chosen = torch.arange(K).expand(N, K).contiguous()
    weight = torch.rand(N, K, generator=gen, dtype=dtype)
    w1, w3 = (torch.randn(E, width, D, generator=gen, dtype=dtype) / D**0.5 for _ in range(2))
    return x, chosen, weight, w1, w3, torch.randn(E, D, width, generator=gen, dtype=dtype) / width**0.5


@pytest.mark.parametrize("crowd", [False, True])
@pytest.mark.parametrize(("N", "E", "K"), [(1, 4, 1), (1, 8, 3), (17, 4, 2), (64, 16, 4)])
def test_grouped_is_the_loop(N, E, K, crowd):
    args = case(N, E, K, crowd=crowd)
    leaves = [x.requires_grad_() for x in args if x.is_floating_point()]
    results = []
    for fn in (experts_grouped, experts_loop):
        y = fn(*args, act)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=2e-5, atol=2e-5)


def test_float64_goes_through_the_loop():
    args = case(9, 4, 2, dtype=torch.float64)
    assert torch.equal(experts(*args, act), experts_loop(*args, act))


def test_a_token_does_not_depend_on_its_batch_mates():
    x, chosen, weight, *w = case(33, 8, 2)
    whole = experts(x, chosen, weight, *w, act)
    one = experts(x[5:6], chosen[5:6], weight[5:6], *w, act)
    torch.testing.assert_close(whole[5:6], one, rtol=1e-5, atol=1e-5)
