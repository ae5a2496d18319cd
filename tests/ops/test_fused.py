"""Fused native operations against their torch twins: values and gradients, on shapes that fill no vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nonet import native
from nonet.ops import fused

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
SHAPES = [(1, 1, 16), (3, 5, 37), (2, 33, 128)]


def leaves(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=gen).requires_grad_() for s in shapes]


def both(fast, slow, inputs: list[Tensor], tolerance: float = 2e-6) -> None:
    """fast(*inputs) in float32 is slow(*inputs) in float64, and so are the gradients of a random projection."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y, want = fast(*inputs), slow(*wide)
    along = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    got = [y, *torch.autograd.grad(y, inputs, along.float())]
    expected = [want, *torch.autograd.grad(want, wide, along)]
    for a, b in zip(got, expected, strict=True):
        scale = float(b.detach().abs().max()) + 1e-12
        assert float((a - b).detach().abs().max()) / scale < tolerance * (1 + b.numel() ** 0.25)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape):
    x, w = leaves(shape, shape[-1:])
    both(lambda x, w: fused.rms_norm(x, w, 1e-5), lambda x, w: fused.rms_norm_torch(x, w, 1e-5), [x, w])


@pytest.mark.parametrize("situ", [None, (4.0, 25.0)])
@pytest.mark.parametrize("shape", [*SHAPES, (9001,)])
def test_gated_activation(shape, situ):
    gate, up = leaves(shape, shape)
    with torch.no_grad():
        gate.mul_(8), up.mul_(20)  # into saturation
        gate.view(-1)[0] = up.view(-1)[0] = 0
    both(lambda g, u: fused.gated(g, u, situ), lambda g, u: fused.gated_torch(g, u, situ), [gate, up], 4e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixture(shape, count):
    query, *sources = leaves(shape[-1:], *[shape] * count)
    both(
        lambda q, *v: fused.mixture(v, q, 1e-5), lambda q, *v: fused.mixture_torch(v, q, 1e-5), [query, *sources], 5e-6
    )


def test_the_native_side_is_really_taken_and_other_dtypes_are_not(monkeypatch):
    x, w = leaves((4, 16), (16,))
    assert type(fused.rms_norm(x, w, 1e-5).grad_fn).__name__ == "_RMSNormBackward"
    assert type(fused.rms_norm(x.double(), w.double(), 1e-5).grad_fn).__name__ == "MulBackward0"
    monkeypatch.setattr(fused, "_library", lambda: None)
    assert type(fused.rms_norm(x, w, 1e-5).grad_fn).__name__ == "MulBackward0"


def test_non_contiguous_inputs_and_gradients():
    x, w = leaves((6, 4, 20), (20,))
    moved = x.transpose(0, 1)
    y = fused.rms_norm(moved, w, 1e-5)
    torch.testing.assert_close(y, fused.rms_norm_torch(moved, w, 1e-5))
    g1 = torch.autograd.grad(y.transpose(0, 1).sum(-1).square().sum(), [x, w])
    g2 = torch.autograd.grad(fused.rms_norm_torch(moved, w, 1e-5).transpose(0, 1).sum(-1).square().sum(), [x, w])
    for a, b in zip(g1, g2, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
