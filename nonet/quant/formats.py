"""Microscaling formats (OCP MX v1.0): 32 neighbours along the last dimension share one power-of-two scale.

A block is 32 consecutive elements of the last dimension, the one a matrix product contracts. Its scale is an E8M0
byte b, worth 2^(b - 127); 255 means NaN. An element is a small float, worth code value times scale:

    format      element  grid of positive values                    largest
    mxfp4       E2M1     0 0.5 1 1.5 2 3 4 6, one subnormal                6
    mxfp8       E4M3     3 mantissa bits, subnormals from 2^-9 on        448
    mxfp8_e5m2  E5M2     2 mantissa bits, subnormals from 2^-16 on     57344

With A the largest magnitude of a block and emax = floor(log2(largest)), the scale's exponent is, by rule,

    floor  floor(log2 A) - emax: OCP's own; elements beyond the largest saturate
    even   the same after rounding A to the element's mantissa bits, half up
    ceil   ceil(log2 A) - emax
    rceil  the smallest for which A does not saturate: ceil(log2(A / largest))

clamped to [-127, 127]. Elements are x / scale rounded to the nearest grid point, ties to the even code, subnormals
included, saturated at the largest. Scales and codes equal torchao's bit for bit wherever torchao 0.18 agrees with
itself. The edges:

* NaN or Inf in a block: its scale is 255, its codes are 0, all 32 elements decode to NaN (torchao 0.18 does this for
  NaN only; after Inf it keeps a finite scale). The other blocks of the tensor are untouched.
* A block of zeros: scale byte 0 and, like every zero, codes that keep the element's sign.
* Blocks so small that the scale is clamped (A < 2^(emax - 126)): scale byte 0, worth 2^-127 here as in OCP. torchao
  0.18 writes the same byte but rounds floor, even and ceil elements as if it were worth 2^-126, and rceil elements
  unscaled, so its values come back halved, or zero.
* A block whose A rounds up to 2^128 (even, ceil, rceil; A > 1.75 * 2^127) decodes to Inf there in float32 and
  bfloat16; decode to float64 to see the value. float64 blocks beyond 2^127 * largest saturate.
* Subnormal arithmetic must be on (torch's default, `torch.set_flush_denormal(False)`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 32
SCALE_NAN = 255
Format = Literal["mxfp4", "mxfp8", "mxfp8_e5m2"]
Rule = Literal["floor", "even", "ceil", "rceil"]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Element:
    """One element format: stored mantissa bits, exponents of the smallest and largest normals, the largest value."""

    mantissa: int
    emin: int
    emax: int
    largest: float
    bits: int


ELEMENTS: dict[str, Element] = {
    "mxfp4": Element(1, 0, 2, 6.0, 4),
    "mxfp8": Element(3, -6, 8, 448.0, 8),
    "mxfp8_e5m2": Element(2, -14, 15, 57344.0, 8),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # mxfp4's values, in the order of their codes


@dataclass(frozen=True, slots=True)
class MX:
    """A quantised tensor: codes uint8 [..., K] (mxfp4: bits 0 to 3, sign in bit 3), scales uint8 [..., K/32]."""

    codes: Tensor
    scales: Tensor
    fmt: Format

    def blocks(self) -> tuple[Tensor, Tensor]:
        """(codes [N, 32], scales [N, 1])."""
        codes_N32, scales_N1 = self.codes.reshape(-1, BLOCK), self.scales.reshape(-1, 1)
        if len(codes_N32) != len(scales_N1):
            shapes = f"codes {tuple(self.codes.shape)}, scales {tuple(self.scales.shape)}"
            raise ValueError(f"{shapes}; {BLOCK} codes share one scale")
        return codes_N32, scales_N1


def element(fmt: str) -> Element:
    if fmt not in ELEMENTS:
        raise ValueError(f"fmt = {fmt!r} is no MX format; use one of {', '.join(ELEMENTS)}")
    return ELEMENTS[fmt]


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that quantisation computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored_bits(dtype: torch.dtype) -> int:
    """Stored mantissa bits of float32 or float64."""
    return 52 if dtype == torch.float64 else 23


def blocks(x: Tensor) -> Tensor:
    """x [..., K] as [N, 32], contiguous."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; MX formats take {', '.join(map(str, DTYPES))}")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be a multiple of {BLOCK}")
    return x.reshape(x.numel() // BLOCK, BLOCK).contiguous()


def scale_shape(x: Tensor) -> tuple[int, ...]:
    """[..., K/32] for x [..., K]."""
    return (*x.shape[:-1], x.shape[-1] // BLOCK)


def as_bits(x: Tensor) -> Tensor:
    """float32 or float64 as the integers of the same width; magnitudes keep their order, NaN comes last."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def step_of(e: Element, rule: Rule, width: int) -> int:
    """What to add to the bits of A, `width` of them mantissa, so that its exponent field becomes emax + the scale's.

    Every rule is one such number: a carry out of the mantissa is what steps the exponent up.
    """
    one = 1 << width
    if rule == "floor":
        return 0
    if rule == "even":
        return one >> (e.mantissa + 1)
    if rule == "ceil":
        return one - 1
    if rule == "rceil":
        return one - 1 - int((e.largest / 2.0**e.emax - 1) * one)
    raise ValueError(f"rule = {rule!r} is no scale rule; use one of floor, even, ceil, rceil")


def scales_of(amax: Tensor, e: Element, rule: Rule) -> Tensor:
    """E8M0 bytes from the largest magnitudes of blocks, float32 or float64 [N, 1]."""
    width = stored_bits(amax.dtype)
    bias = 1023 if amax.dtype == torch.float64 else 127
    bits = as_bits(amax)
    step, infinite = step_of(e, rule, width), (2 * bias + 1) << width
    field = (bits + step if step else bits) >> width
    scales = field.sub_(bias - 127 + e.emax).clamp_(0, SCALE_NAN - 1).masked_fill_(bits >= infinite, SCALE_NAN)
    return scales.to(torch.uint8)


def scale_values(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What E8M0 bytes are worth: 2^(b - 127), NaN for 255."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)


def inverse_values(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(127 - b), NaN for 255: the byte 254 - b, which wraps to 255 for 255."""
    return scale_values(254 - scales, dtype)


@torch.no_grad()
def block_scales(x: Tensor, fmt: Format = "mxfp4", rule: Rule = "floor") -> Tensor:
    """The E8M0 byte of every block of x [..., K]: uint8 [..., K/32]."""
    amax_N1 = blocks(x).abs().amax(-1, keepdim=True).to(working(x.dtype))
    return scales_of(amax_N1, element(fmt), rule).view(scale_shape(x))


@torch.no_grad()
def saturated(x: Tensor, fmt: Format = "mxfp4", rule: Rule = "floor") -> Tensor:
    """Where |x| lies beyond the largest value its block can hold: bool [..., K]. Never with ceil or rceil."""
    scales_N1 = block_scales(x, fmt, rule).view(-1, 1)
    limits_N1 = scale_values(scales_N1, torch.float64) * element(fmt).largest
    return (blocks(x).abs() > limits_N1).view(x.shape)
