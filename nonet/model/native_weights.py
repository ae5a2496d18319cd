"""Weight matrices as native/products.h reads them: copies in an order of their own, or in fewer bits.

    float32  exactly, by panels of 16 rows: the first number of each, the second of each, ...
    bf16     the nearest bfloat16
    w16a16   the same, and what they multiply is rounded to bfloat16 too, as on a GPU: half the work of many rows, where
             the processor has AVX512-BF16; elsewhere it is bf16
    int8     bytes in -127..127 times a float a row, max |row| / 127
    mxfp4    E2M1 codes in blocks of 32 times a power of two (quant/mx.py)

In fewer bits rows lie one after another, each filled up with zeros to whole blocks of 32, then the scales. `rounded` is
the float32 matrix that a copy stands for: what a torch twin multiplies by. `Watch` says when copies are out of date.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from nonet.quant import mx
from nonet.quant.formats import Rule
from nonet.types import UserError

Weights = Literal["float32", "bf16", "w16a16", "int8", "mxfp4"]
NUMBERS: dict[Weights, int] = {"float32": 0, "bf16": 1, "w16a16": 4, "int8": 2, "mxfp4": 3}  # as in products.h
BITS: dict[Weights, float] = {"float32": 32, "bf16": 16, "w16a16": 16, "int8": 8, "mxfp4": 4.25}
_BLOCK, _PANEL = 32, 16


def known(name: str) -> Weights:
    for weights in get_args(Weights):
        if weights == name:
            return weights
    raise UserError(f"weights {name!r}: not one of {', '.join(get_args(Weights))}")


class Copies:
    """Addresses of matrices in one format, and what must live as long as the addresses do."""

    def __init__(self, weights: Weights, rule: Rule):
        self.weights: Weights = weights
        self.rule: Rule = rule
        self._kept: list[Tensor] = []

    def at(self, weight: Tensor, weights: Weights | None = None) -> int:
        """Of a [N, K] matrix or an [E, N, K] stack. weights: another format than the others'."""
        stored = pack(weight.detach(), weights or self.weights, self.rule)
        self._kept.append(stored)
        return stored.data_ptr()


class Watch:
    """Whether weights have changed since it last said so.

    Torch counts changes of a tensor in place, and one whose .data has been replaced lies elsewhere. Fused optimisers do
    not count; that is made up for here. Tensors made under torch.inference_mode have no count: they are taken for
    changed every time. Not seen is what is written through .data or numpy; then tell it to `forget`.
    """

    def __init__(self, weights: Iterable[Tensor]):
        _count_steps()
        self._weights = list(weights)
        self.forget()

    def forget(self) -> None:
        """Take them for changed."""
        self._seen: list[int] = []
        self._held: list[Tensor] = []

    def changed(self) -> bool:
        if any(map(Tensor.is_inference, self._weights)):
            return True
        now = [*map(Tensor.data_ptr, self._weights), *map(attrgetter("_version"), self._weights)]
        if now == self._seen:
            return False
        self._seen = now
        self._held = [w.detach() for w in self._weights]  # or what is freed might be where the next .data comes to lie
        return True


@cache
def _count_steps() -> None:
    """From now on every step of any torch optimiser counts as a change of what it trains."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, *_: Any) -> None:
    increment_version([w for group in optimizer.param_groups for w in group["params"] if w.grad is not None])


def pack(weight: Tensor, weights: Weights, rule: Rule = "even") -> Tensor:
    """[..., N, K] float32 -> uint8 [..., bytes of a matrix], or float32 [..., panels, K, 16]."""
    if weights == "float32":
        return F.pad(weight, (0, 0, 0, -weight.shape[-2] % _PANEL)).unflatten(-2, (-1, _PANEL)).mT.contiguous()
    padded = _padded(weight)
    if weights in ("bf16", "w16a16"):
        return _bytes(padded.bfloat16())
    if weights == "int8":
        scale = _row_scale(padded)
        return torch.cat([_bytes((padded / scale).round().to(torch.int8)), _bytes(scale)], -1)
    assert weights == "mxfp4"
    encoded = mx.encode(padded, "mxfp4", rule)
    codes = encoded.codes.unflatten(-1, (-1, 2, _BLOCK // 2))
    return torch.cat([_bytes(codes[..., 0, :] | codes[..., 1, :] << 4, 3), _bytes(encoded.scales)], -1)


def rounded(weight: Tensor, weights: Weights, rule: Rule = "even") -> Tensor:
    """[..., K] float32: the numbers that stand in a copy."""
    if weights == "float32":
        return weight
    if weights in ("bf16", "w16a16"):
        return weight.bfloat16().float()
    if weights == "int8":
        scale = _row_scale(weight)
        return (weight / scale).round() * scale
    return mx.fake(_padded(weight), "mxfp4", rule)[..., : weight.shape[-1]]


def _padded(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[-1] % _BLOCK))


def _row_scale(weight: Tensor) -> Tensor:
    """[..., N, 1]; 1 for a row of zeros."""
    top = weight.abs().amax(-1, keepdim=True)
    return torch.where(top > 0, top / 127, torch.ones_like(top))


def _bytes(t: Tensor, matrix_dims: int = 2) -> Tensor:
    """The bytes of [..., N, K] (or [..., N, blocks, 16]) as uint8 [..., n]."""
    t = t.contiguous()
    return (
        t.view(torch.uint8).flatten(t.ndim - matrix_dims) if t.dtype != torch.uint8 else t.flatten(t.ndim - matrix_dims)
    )
