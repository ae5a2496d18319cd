"""What stands behind the KDA scan, fused: y = sigmoid(gate) * RMSNorm(o) per head, one weight for all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nonet.ops.kda_native import address, call, fits, wants_gradient

BLOCK = 64  # rows behind each partial sum of the weight's gradient, as in native/kda_epilogue.h


def kda_epilogue(o_BTHK: Tensor, gate_BTC: Tensor, weight_K: Tensor, eps: float, *, native: bool = True) -> Tensor:
    """y_BTC, C = H * K."""
    alike = o_BTHK.dtype == gate_BTC.dtype == weight_K.dtype
    if not (native and alike and fits(o_BTHK, o_BTHK.shape[-1])):
        return _torch(o_BTHK, gate_BTC, weight_K, eps)
    if wants_gradient(o_BTHK, gate_BTC, weight_K):
        return _Epilogue.apply(o_BTHK, gate_BTC, weight_K, eps)  # type: ignore[return-value]
    return _forward(o_BTHK, gate_BTC, weight_K, eps)


def _torch(o_BTHK: Tensor, gate_BTC: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    normed = o_BTHK * torch.rsqrt(o_BTHK.square().mean(-1, keepdim=True) + eps) * weight_K
    return torch.sigmoid(gate_BTC) * normed.flatten(2)


def _forward(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _call("kda_epilogue", o, gate, weight, eps, y=y)
    return y


def _call(name: str, o: Tensor, gate: Tensor, weight: Tensor, eps: float, **outputs: Tensor) -> None:
    B, T, H, K = o.shape
    o, gate, weight = o.contiguous(), gate.contiguous(), weight.contiguous()
    epsilon = torch.tensor(eps, dtype=o.dtype)
    ends = (address(outputs.get(n)) for n in ("y", "dy", "d_o", "dgate", "dweight"))
    inputs = (o.data_ptr(), gate.data_ptr(), weight.data_ptr(), H * K, epsilon.data_ptr())
    call(name, o.dtype, *inputs, *ends, B * T, H, K, torch.get_num_threads())


class _Epilogue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float):
        ctx.save_for_backward(o, gate, weight)
        ctx.eps = eps
        return _forward(o, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        o, gate, weight = ctx.saved_tensors
        B, T = gate.shape[:2]
        d_o, dgate = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (o, gate))
        dweight = weight.new_zeros(-(-B * T // BLOCK), len(weight))
        out = {"dy": dy.contiguous(), "d_o": d_o, "dgate": dgate, "dweight": dweight}
        _call("kda_epilogue_back", o, gate, weight, ctx.eps, **out)
        return d_o, dgate, dweight.sum(0), None
