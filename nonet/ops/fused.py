"""RMSNorm, gated activations and the attention-residual mixture: one pass over memory each, where torch takes five.

Each public function computes its definition (the `_torch` twin of the same signature) through native/fused.c when a
gradient is being recorded and all tensors are float32 on the CPU; anything else takes the twin, so that a plain forward
rounds as torch does everywhere. Gradients of first order only. Off with NONET_NATIVE=0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nonet import native

MOST_SOURCES = 64  # as in fused.c


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return _RMSNorm.apply(x, weight_D, eps) if _fast(x, weight_D) else rms_norm_torch(x, weight_D, eps)  # pyright: ignore


def rms_norm_torch(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    # Written out: torch's own rms_norm is 2.5x slower than this on CPU (measured, docs/log.md).
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D


def gated(gate: Tensor, up: Tensor, situ: tuple[float, float] | None) -> Tensor:
    """silu(gate) * up, or with situ = (b1, b2): [b1 tanh(g/b1) sigmoid(g)] * [b2 tanh(u/b2)], |.| < b1 b2 (k3 1.5)."""
    return _Gated.apply(gate, up, *(situ or (0.0, 0.0))) if _fast(gate, up) else gated_torch(gate, up, situ)  # pyright: ignore


def gated_torch(gate: Tensor, up: Tensor, situ: tuple[float, float] | None) -> Tensor:
    if situ is None:
        return F.silu(gate) * up
    b1, b2 = situ
    return (b1 * torch.tanh(gate / b1) * torch.sigmoid(gate)) * (b2 * torch.tanh(up / b2))


def mixture(sources: Sequence[Tensor], query_D: Tensor, eps: float) -> Tensor:
    """sum_j a_j v_j with a = softmax_j(query . v_j / rms(v_j)), over the last dimension of each v (k3 section 1.4).

    Scores and sums in float32 at least: the margins between scores are small.
    """
    if len(sources) <= MOST_SOURCES and _fast(query_D, *sources):
        return _Mixture.apply(query_D, eps, *sources)  # pyright: ignore[reportReturnType]
    return mixture_torch(sources, query_D, eps)


def mixture_torch(sources: Sequence[Tensor], query_D: Tensor, eps: float) -> Tensor:
    wide = [v if v.dtype in (torch.float32, torch.float64) else v.float() for v in sources]
    query_D = query_D.to(wide[0].dtype)
    inverse = [torch.rsqrt(v.square().mean(-1) + eps) for v in wide]
    scores = torch.stack([(v @ query_D) * r for v, r in zip(wide, inverse, strict=True)], -1)
    weights = scores.softmax(-1).unbind(-1)
    mixed = weights[0].unsqueeze(-1) * wide[0]
    for a, v in zip(weights[1:], wide[1:], strict=True):
        mixed = torch.addcmul(mixed, a.unsqueeze(-1), v)
    return mixed.to(sources[0].dtype)


# ------------------------------------------------------------- the native side


@cache
def _library() -> ctypes.CDLL | None:
    return native.library()


def _fast(*tensors: Tensor) -> bool:
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    return plain and not torch.is_autocast_enabled("cpu") and tensors[0].numel() > 0 and _library() is not None


def _call(name: str, *arguments: Tensor | int | float | ctypes.Array) -> None:
    library = _library()
    assert library is not None
    getattr(library, name)(*(_argument(a) for a in arguments))


def _argument(a: Tensor | int | float | ctypes.Array) -> Any:
    if isinstance(a, Tensor):
        return ctypes.c_void_p(a.data_ptr())
    if isinstance(a, int):
        return ctypes.c_int64(a)
    return ctypes.c_float(a) if isinstance(a, float) else a


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        D = x.shape[-1]
        y, inverse = torch.empty_like(x), x.new_empty(x.numel() // D)
        _call("rmsnorm_forward", x, weight, y, inverse, len(inverse), D, float(eps), torch.get_num_threads())
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        D, threads = x.shape[-1], torch.get_num_threads()
        dx, dw = torch.empty_like(x), weight.new_empty(threads, D)
        _call("rmsnorm_backward", dy.contiguous(), x, weight, inverse, dx, dw, len(inverse), D, threads)
        return dx, dw.sum(0), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, b1: float, b2: float) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _call("gated_forward", gate, up, y, gate.numel(), float(b1), float(b2), torch.get_num_threads())
        ctx.save_for_backward(gate, up)
        ctx.bounds = float(b1), float(b2)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        dy, threads = dy.contiguous(), torch.get_num_threads()
        _call("gated_backward", dy, gate, up, dgate, dup, gate.numel(), *ctx.bounds, threads)
        return dgate, dup, None, None


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        query, sources = query.contiguous(), tuple(v.contiguous() for v in sources)
        J, D = len(sources), len(query)
        n, h = sources[0].numel() // D, torch.empty_like(sources[0])
        kept = query.new_empty(3, n, J)  # weights, 1/rms, query . v
        pointers, threads = _addresses(sources), torch.get_num_threads()
        _call("mix_forward", pointers, query, h, *kept, J, n, D, float(eps), threads)
        ctx.save_for_backward(query, kept, *sources)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, kept, *sources = ctx.saved_tensors
        J, D, threads = len(sources), len(query), torch.get_num_threads()
        dv, dq = [torch.empty_like(v) for v in sources], query.new_empty(threads, D)
        before, after = _addresses(sources), _addresses(dv)
        _call("mix_backward", dh.contiguous(), before, query, *kept, after, dq, J, kept.shape[1], D, threads)
        return dq.sum(0), None, *dv
