"""The fused prologue and epilogue of the KDA mixer: C against the torch they stand for, and torch against formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kda_cases import error
from torch import Tensor
from torch.nn import functional as F

from nonet import native
from nonet.ops.kda_epilogue import kda_epilogue
from nonet.ops.kda_prologue import kda_prologue

needs_native = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
B, T, H, K = 2, 37, 3, 32
C = H * K
NAMES = ("q", "k", "v", "q taps", "k taps", "v taps", "tail", "z", "b", "A_log", "dt_bias")
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "padded": {"counts": [37, 9]},
    "packed": {"starts": [0, 1, 3, 20, 37, 50]},
    "packed and padded": {"starts": [0, 20, 37, 39, 40], "counts": [20, 17, 2, 0, 11]},
}


def made(layout: dict[str, Any], dtype: torch.dtype = torch.float64, tail: bool = True, J: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    N = len(layout.get("starts", range(B)))
    before = normal(N, J - 1, 3 * C) if tail else torch.zeros(N, J - 1, 3 * C, dtype=dtype)
    taps = [normal(C, J) / 2 for _ in range(3)]
    return [*(normal(B, T, C) for _ in range(3)), *taps, before, 3 * normal(B, T, C), normal(B, T, H), *_gates(normal)]


def _gates(normal: Any) -> tuple[Tensor, Tensor]:
    return 0.3 * normal(H), normal(C)


def run(args: list[Tensor], layout: dict[str, Any], lower: float | None = -5.0, **more: Any) -> tuple[Tensor, ...]:
    q, k, v, tq, tk, tv, tail, z, b, A_log, bias = args
    return kda_prologue((q, k, v), (tq, tk, tv), tail, z, b, A_log, bias, lower, **layout, **more)


def gradients(args: list[Tensor], layout: dict[str, Any], **more: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in args]
    generator = torch.Generator().manual_seed(9)
    out = run(leaves, layout, **more)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in out]
    return list(torch.autograd.grad([(x * w).sum() for x, w in zip(out, weights, strict=True)], leaves))


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_c_is_torch(layout: dict[str, Any], dtype: torch.dtype, bound: float):
    args = made(layout)
    slow = run(args, layout, native=False)
    fast = run([x.to(dtype) for x in args], layout)
    for name, a, b in zip(("q", "k", "v", "g", "beta", "tail"), fast, slow, strict=True):
        assert a.dtype == dtype
        assert error([a], [b]) <= bound, name


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_gradients_of_c_are_those_of_torch(layout: dict[str, Any], dtype: torch.dtype, bound: float):
    args = made(layout)
    slow = gradients(args, layout, native=False)
    fast = gradients([x.to(dtype) for x in args], layout)
    for name, a, b in zip(NAMES, fast, slow, strict=True):
        assert error([a], [b]) <= bound, name


@needs_native
def test_threads_change_no_bit():
    args = [x.float() for x in made(LAYOUTS["packed"])]
    once = [*run(args, LAYOUTS["packed"]), *gradients(args, LAYOUTS["packed"])]
    torch.set_num_threads(2)
    try:
        twice = [*run(args, LAYOUTS["packed"]), *gradients(args, LAYOUTS["packed"])]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("switch", [pytest.param(True, marks=needs_native), False])
def test_a_cut_sequence_carries_its_last_inputs(switch: bool):
    args = made({})
    whole = run(args, {}, native=switch)
    inputs = (0, 1, 2, 7, 8)
    for cut in (1, 2, 3, 20):
        first = run([x[:, :cut] if i in inputs else x for i, x in enumerate(args)], {}, native=switch)
        rest = [x[:, cut:] if i in inputs else x for i, x in enumerate(args)]
        rest[6] = first[5]
        second = run(rest, {}, native=switch)
        joined = [torch.cat([a, b], 1) for a, b in zip(first[:5], second[:5], strict=True)]
        assert error([*joined, second[5]], whole) < 1e-12


@pytest.mark.parametrize("switch", [pytest.param(True, marks=needs_native), False])
def test_what_comes_later_changes_no_bit_of_what_came_before(switch: bool):
    args = [x.float() for x in made({})]
    other = [x.clone() for x in args]
    for i in (0, 1, 2, 7, 8):
        other[i][:, 11:] = 7
    for a, b in zip(run(args, {}, native=switch)[:5], run(other, {}, native=switch)[:5], strict=True):
        assert torch.equal(a[:, :11], b[:, :11])


@pytest.mark.parametrize("switch", [pytest.param(True, marks=needs_native), False])
def test_it_is_a_convolution_a_norm_and_two_sigmoids(switch: bool):
    """Against torch's own convolution, from the definition."""
    args = made({}, tail=False)
    x, taps, z, b, A_log, bias = args[:3], args[3:6], *args[7:]
    q, k, v, g, beta, tail = run([*args[:6], args[6], *args[7:]], {}, native=switch)
    ys = [F.conv1d(i.mT, w.unsqueeze(1), padding=3, groups=C)[..., :T].mT for i, w in zip(x, taps, strict=True)]
    sq, sk, sv = (F.silu(y).view(B, T, H, K) for y in ys)
    wanted = [
        *(sq / (sq.square().sum(-1, keepdim=True) + 1e-6).sqrt() * K**-0.5,),
        *(sk / (sk.square().sum(-1, keepdim=True) + 1e-6).sqrt(), sv),
        *(-5 * torch.sigmoid(A_log.exp()[:, None] * (z + bias).view(B, T, H, K)), torch.sigmoid(b)),
        torch.cat(list(x), -1)[:, -3:],
    ]
    assert error([q, k, v, g, beta, tail], wanted) < 1e-12


@pytest.mark.parametrize("switch", [pytest.param(True, marks=needs_native), False])
def test_other_gates(switch: bool):
    args = made({})
    q, k, v, tq, tk, tv, tail, z, b, A_log, bias = args
    g = kda_prologue((q, k, v), (tq, tk, tv), tail, z, b, A_log, bias, None, native=switch)[3]
    slow = -A_log.exp()[:, None] * F.softplus(z + bias).view(B, T, H, K)
    assert error([g], [slow]) < 1e-12
    none = kda_prologue((q, k, v), (tq, tk, tv), tail, None, b, A_log, bias, None, native=switch)
    assert not none[3].any()
    assert error(none[:3], run(args, {})[:3]) < 1e-12


def test_other_numbers_of_taps_go_through_torch():
    for J in (1, 2, 5):
        args = made({}, J=J)
        q, _, v, *_, tail = run(args, {})
        joined = torch.cat([args[6][..., 2 * C :], args[2]], 1)
        y = sum(joined[:, j : j + T] * args[5][:, j] for j in range(J))
        assert error([v], [F.silu(y).view(B, T, H, K)]) < 1e-12
        assert tail.shape == (B, J - 1, 3 * C)
        assert q.shape == (B, T, H, K)


@needs_native
def test_gradcheck():
    layout = {"starts": [0, 2, 5], "counts": [2, 3, 1]}
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 6, 16)] * 3 + [(16, 4)] * 3 + [(3, 3, 48), (1, 6, 16), (1, 6, 1), (1,), (16,)]
    args = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *a: run(list(a), layout), args, eps=1e-6, atol=1e-7, fast_mode=True)


@needs_native
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_epilogue(dtype: torch.dtype, bound: float):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 75, H, K), (2, 75, C), (K,)]
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    upstream = torch.randn(2, 75, C, generator=generator, dtype=torch.float64)
    results = []
    for switch, kind in ((False, torch.float64), (True, dtype)):
        leaves = [x.to(kind).requires_grad_() for x in args]
        y = kda_epilogue(*leaves, 1e-5, native=switch)
        assert torch.equal(y, kda_epilogue(*(x.detach() for x in leaves), 1e-5, native=switch))
        results.append([y, *torch.autograd.grad(y, leaves, upstream.to(kind))])
    for name, a, b in zip(("y", "o", "gate", "weight"), results[1], results[0], strict=True):
        assert error([a], [b]) <= bound, name
    o, gate, weight = args
    by_hand = torch.sigmoid(gate) * (o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).flatten(2)
    assert error([results[0][0]], [by_hand]) < 1e-12
