"""encode, decode and fake for the formats of formats.py, fast: a part of a tensor at a time, in buffers that stay in
cache, with additions in place of taking numbers apart. fake of float32 and bfloat16 is one pass in C where it can be
(native/mx.c), with the same additions.

NONET_MX_FAST=0 makes all three call their twins of mx_slow.py; NONET_NATIVE=0 switches the C off.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from nonet.native import library
from nonet.quant.formats import (
    BLOCK,
    E2M1,
    MX,
    SCALE_NAN,
    Element,
    Format,
    Rule,
    as_bits,
    block_scales,
    blocks,
    element,
    inverse_values,
    saturated,
    scale_shape,
    scale_values,
    scales_of,
    step_of,
    stored_bits,
    working,
)
from nonet.quant.mx_slow import decode_slow, encode_slow, fake_slow

__all__ = [  # formats.py's names that belong to the public face too
    "BLOCK",
    "E2M1",
    "MX",
    "Format",
    "Rule",
    "block_scales",
    "decode",
    "encode",
    "fake",
    "saturated",
    "scale_values",
]

# Blocks worked on at a time on a processor: few enough that the buffers stay in cache, enough that calls cost little.
PART = 1 << 13
ALONE = 1 << 12  # blocks that one thread is done with before a second one has woken up


def _slow() -> bool:
    return os.environ.get("NONET_MX_FAST") == "0"


def _parts(blocks_N32: Tensor) -> tuple[Tensor, ...]:
    """Runs of blocks that fit a processor's cache, at least one; on an accelerator, everything at once."""
    return blocks_N32.split(PART) if blocks_N32.device.type == "cpu" else (blocks_N32,)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# -------------------------------------------------------------------- encode


@torch.no_grad()
def encode(x: Tensor, fmt: Format = "mxfp4", rule: Rule = "floor") -> MX:
    """Quantise x [..., K], bfloat16, float32 or float64, K a multiple of 32, any strides; the result is contiguous."""
    if _slow():
        return encode_slow(x, fmt, rule)
    e = element(fmt)
    parts = [_encode_part(part, e, rule) for part in _parts(blocks(x))]
    codes_N32, scales_N1 = (_joined([part[i] for part in parts]) for i in range(2))
    return MX(codes_N32.view(x.shape), scales_N1.view(scale_shape(x)), fmt)


def _encode_part(x: Tensor, e: Element, rule: Rule) -> tuple[Tensor, Tensor]:
    """(codes, scales) of blocks [N, 32]."""
    x = x.to(working(x.dtype))
    y = x.abs()
    scales = scales_of(as_bits(y).amax(-1, keepdim=True).view(y.dtype), e, rule)
    inverse = inverse_values(scales, y.dtype)
    if e.bits == 8 and x.dtype == torch.float32:
        rounded = torch.mul(x, inverse, out=y).clamp_(-e.largest, e.largest)  # the cast does the rounding
    else:
        signs = as_bits(x) ^ as_bits(y)
        y.mul_(inverse)
        _nearest_(y, y.clamp(min=2.0**e.emin), e).clamp_(max=e.largest)
        rounded = as_bits(y).bitwise_or_(signs).view(y.dtype)
    if e.bits == 8:
        codes = rounded.to(torch.float8_e4m3fn if e.mantissa == 3 else torch.float8_e5m2).view(torch.uint8)
    else:  # 2^-14 times as large, an E2M1 number is an E5M2 number with its fields one bit higher
        eight = rounded.mul_(2.0**-14).to(torch.float8_e5m2).view(torch.uint8)
        codes = ((eight >> 1) & 7) | ((eight >> 4) & 8)
    poisoned = scales == SCALE_NAN
    if poisoned.any():
        codes.masked_fill_(poisoned, 0)
    return codes, scales


# -------------------------------------------------------------------- decode


@torch.no_grad()
def decode(mx: MX, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., K] that codes and scales stand for; exact in float32 and float64 but for formats.py's edges."""
    if _slow():
        return decode_slow(mx, dtype)
    e, (codes_N32, scales_N1) = element(mx.fmt), mx.blocks()
    out_N32 = torch.empty(codes_N32.shape, dtype=dtype, device=mx.codes.device)
    for codes, scales, out in zip(*map(_parts, (codes_N32, scales_N1, out_N32)), strict=True):
        torch.mul(_code_values(codes, e, working(dtype)), scale_values(scales, working(dtype)), out=out)
    return out_N32.view(mx.codes.shape)


def _code_values(codes: Tensor, e: Element, dtype: torch.dtype) -> Tensor:
    """A code's fields, moved to the places they have in float16, are its value times 2^(-14 - emin)."""
    sign = 1 << (e.bits - 1)
    wide = codes.to(torch.int16)
    half = ((wide & (sign - 1)) << (10 - e.mantissa)) | ((wide & sign) << (16 - e.bits))
    values = half.view(torch.float16).to(dtype).mul_(2.0 ** (14 + e.emin))
    if e.mantissa == 3:  # its one NaN is a number in float16
        values.masked_fill_((codes & 127) == 127, float("nan"))
    return values


# ---------------------------------------------------------------------- fake


@torch.no_grad()
def fake(x: Tensor, fmt: Format = "mxfp4", rule: Rule = "floor", name: str | None = None) -> Tensor:
    """decode(encode(x)) in x's dtype [..., K] without the codes; the same bits, signed zeros included.

    With a `name`, a NaN or an Inf in x is refused with a sentence that names the tensor; else it poisons its block.
    """
    if _slow():
        return fake_slow(x, fmt, rule, name)
    e, blocks_N32 = element(fmt), blocks(x)
    if x.device.type == "cpu" and working(x.dtype) == torch.float32 and library() is not None:
        found_N32 = _fake_native(blocks_N32.float(), e, rule)
        return fake_slow(x, fmt, rule, name) if found_N32 is None else found_N32.view(x.shape).to(x.dtype)
    out_N32 = torch.empty(blocks_N32.shape, dtype=x.dtype, device=x.device)
    parts = _parts(blocks_N32)
    scratch = torch.empty(4, *parts[0].shape, dtype=working(x.dtype), device=x.device)
    for part, out in zip(parts, _parts(out_N32), strict=True):
        if len(part) and not _fake_part(part, out, scratch, e, rule):
            out.copy_(fake_slow(part, fmt, rule, name))
    return out_N32.view(x.shape)


def _fake_native(x_N32: Tensor, e: Element, rule: Rule) -> Tensor | None:
    """`_fake_part` of everything, float32; None if some block is not finite or too large for it."""
    lib, out_N32 = library(), torch.empty_like(x_N32)
    assert lib is not None
    constants = (2.0 ** (23 - e.mantissa), _reach(x_N32.dtype, e), 2.0 ** (e.emax - 127))
    scales = (2.0 ** (e.emin - e.emax), e.largest / 2.0**e.emax)
    fine = lib.mx_fake(
        ctypes.c_void_p(x_N32.data_ptr()), ctypes.c_void_p(out_N32.data_ptr()), ctypes.c_int64(len(x_N32)),
        ctypes.c_uint32(step_of(e, rule, 23)), *map(ctypes.c_float, (*constants, *scales)),
        ctypes.c_int64(torch.get_num_threads() if len(x_N32) > ALONE else 1),
    )  # fmt: skip
    return out_N32 if fine else None


def _fake_part(x: Tensor, out: Tensor, scratch: Tensor, e: Element, rule: Rule) -> bool:
    """Fill `out` with fake x; False, with nothing written, if a block is not finite or too large for `_nearest_`."""
    y, step, signs, loaded = scratch[:, : len(x)].unbind()
    if x.dtype != y.dtype:
        x = loaded.copy_(x)
    torch.abs(x, out=y)
    amax_bits = as_bits(y).amax(-1, keepdim=True)
    if not amax_bits.max().view(y.dtype).item() < _reach(y.dtype, e):  # a NaN is not less, either
        return False
    torch.bitwise_xor(as_bits(x), as_bits(y), out=as_bits(signs))
    width = stored_bits(y.dtype)
    binade = (amax_bits + step_of(e, rule, width)).bitwise_and_(-1 << width).view(y.dtype)  # scale * 2^emax
    binade.clamp_(min=2.0 ** (e.emax - 127))
    torch.maximum(y, binade * 2.0 ** (e.emin - e.emax), out=step)
    torch.minimum(_nearest_(y, step, e), binade * (e.largest / 2.0**e.emax), out=y)
    torch.bitwise_or(as_bits(y), as_bits(signs), out=as_bits(out if out.dtype == y.dtype else y))
    if out.dtype != y.dtype:
        out.copy_(y)
    return True


def _nearest_(y: Tensor, step: Tensor, e: Element) -> Tensor:
    """Round y >= 0 to e's grid in place, ties to even, without saturation. `step` comes as max(y, scale * 2^emin) and
    is overwritten.

    Let g be the distance of grid points at y, which stops shrinking near zero, and p the stored mantissa bits of the
    arithmetic. c = 2^(p - mantissa) * step has g as its last place. With the lowest bit of `step` cleared, c is an even
    multiple of g, so adding it rounds y to the grid with the grid's own ties, and taking it off is exact. Where y + c
    carries into the next binade it is rounded to 2 g, and y is so close to the next power of two that this is right.
    """
    as_bits(step).bitwise_and_(-2)
    shift = 2.0 ** (stored_bits(y.dtype) - e.mantissa)
    return y.add_(step, alpha=shift).sub_(step, alpha=shift)


def _reach(dtype: torch.dtype, e: Element) -> float:
    """Magnitudes below this one neither overflow in `_nearest_`, by any rule, nor have their scale clamped."""
    top = 127 + e.emax - 1 if dtype == torch.float64 else 127 - 2 - (stored_bits(dtype) - e.mantissa)
    return 2.0**top
