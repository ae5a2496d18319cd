"""The definition of MX quantisation in as few and plain steps as it has: what mx.py must equal bit for bit.

Used by tests, by mx.py for blocks its additions cannot hold, and for everything with NONET_MX_FAST=0.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nonet.quant.formats import (
    MX,
    SCALE_NAN,
    Element,
    Format,
    Rule,
    blocks,
    element,
    inverse_values,
    scale_shape,
    scale_values,
    scales_of,
    working,
)
from nonet.types import UserError


@torch.no_grad()
def encode_slow(x: Tensor, fmt: Format = "mxfp4", rule: Rule = "floor") -> MX:
    """Divide by the scale, then count the midpoints of the grid below each magnitude."""
    e, values_N32 = element(fmt), blocks(x).to(working(x.dtype))
    scales_N1 = scales_of(values_N32.abs().amax(-1, keepdim=True), e, rule)
    magnitudes = (values_N32 * inverse_values(scales_N1, values_N32.dtype)).abs()
    codes = torch.bucketize(magnitudes, _edges(e, magnitudes.dtype).to(x.device), right=True).to(torch.uint8)
    codes |= values_N32.signbit().to(torch.uint8) << (e.bits - 1)
    codes.masked_fill_(scales_N1 == SCALE_NAN, 0)
    return MX(codes.view(x.shape), scales_N1.view(scale_shape(x)), fmt)


@torch.no_grad()
def decode_slow(mx: MX, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look every code up, then multiply by the scale."""
    codes_N32, scales_N1 = mx.blocks()
    values = torch.tensor(code_values(element(mx.fmt)), dtype=working(dtype), device=mx.codes.device)
    decoded = values[codes_N32.int()] * scale_values(scales_N1, working(dtype))
    return decoded.to(dtype).view(mx.codes.shape)


def fake_slow(x: Tensor, fmt: Format = "mxfp4", rule: Rule = "floor", name: str | None = None) -> Tensor:
    """decode(encode(x)), literally."""
    mx = encode_slow(x, fmt, rule)
    if name is not None and bool((mx.scales == SCALE_NAN).any()):
        raise UserError(f"{name} holds NaN or Inf and cannot be quantised; go back to a checkpoint and lower the rate")
    return decode_slow(mx, x.dtype)


def code_values(e: Element) -> list[float]:
    """What each code is worth, codes with the sign bit included; NaN and Inf where the format has them."""
    values = []
    for code in range(1 << (e.bits - 1)):
        field, fraction = code >> e.mantissa, (code & ((1 << e.mantissa) - 1)) / (1 << e.mantissa)
        value = (1 + fraction) * 2.0 ** (e.emin + field - 1) if field else fraction * 2.0**e.emin
        if value > e.largest:  # E4M3 has one such code and E5M2 four, of which the first is Inf
            value = float("inf") if e.mantissa == 2 and fraction == 0 else float("nan")
        values.append(value)
    return [*values, *(-v for v in values)]


def _edges(e: Element, dtype: torch.dtype) -> Tensor:
    """Numbers such that an element's code is how many of them it reaches: the midpoints of neighbours, moved up by the
    least step where the upper neighbour is odd, so that ties go to the even code.
    """
    grid = [v for v in code_values(e)[: 1 << (e.bits - 1)] if v <= e.largest]
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(grid)], dtype=dtype)
    above = torch.nextafter(middles, middles + 1)
    middles[0::2] = above[0::2]
    return middles
