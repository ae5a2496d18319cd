"""Weight matrices as native/products.h reads them: torch's own memory, or copies in fewer bits.

    float32  in place
    bf16     the nearest bfloat16
    w16a16   the same, and what they multiply is rounded to bfloat16 too, as on a GPU: half the work of many rows, where
             the processor has AVX512-BF16; elsewhere it is bf16
    int8     bytes in -127..127 times a float a row, max |row| / 127
    mxfp4    E2M1 codes in blocks of 32 times a power of two (quant/mx.py)

A copy holds all rows one after another, each filled up with zeros to whole blocks of 32, then the scales. `rounded` is
the float32 matrix that a copy stands for: what a torch twin multiplies by.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.quant import mx
from nonet.quant.formats import Rule
from nonet.types import UserError

Weights = Literal["float32", "bf16", "w16a16", "int8", "mxfp4"]
NUMBERS: dict[Weights, int] = {"float32": 0, "bf16": 1, "w16a16": 4, "int8": 2, "mxfp4": 3}  # as in products.h
BITS: dict[Weights, float] = {"float32": 32, "bf16": 16, "w16a16": 16, "int8": 8, "mxfp4": 4.25}
_BLOCK = 32


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

    def at(self, weight: Tensor) -> int:
        """Of a [N, K] matrix or an [E, N, K] stack."""
        stored = weight.detach()
        if self.weights != "float32":
            stored = pack(stored, self.weights, self.rule)
        self._kept.append(stored)
        return stored.data_ptr()


def pack(weight: Tensor, weights: Weights, rule: Rule = "even") -> Tensor:
    """[..., N, K] float32 -> uint8 [..., bytes of a matrix]."""
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
