"""Law 15: MX quantisation is the nearest grid point, ties to the even code, saturation aside within half a grid step.

The oracle knows the formats from their definition only: it lists every value a code can have, measures all distances in
float64 (exact for the inputs used) and takes the least. Scales come from exact fractions.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from nonet.quant.mx import Format, Rule, decode, encode, fake

# format -> exponent bits, mantissa bits, bias, number of non-negative codes that are numbers
FORMATS: dict[Format, tuple[int, int, int, int]] = {
    "mxfp4": (2, 1, 1, 8),
    "mxfp8": (4, 3, 7, 127),
    "mxfp8_e5m2": (5, 2, 15, 124),
}
RULES: tuple[Rule, ...] = ("floor", "even", "ceil", "rceil")
CASES = [(f, r) for f in FORMATS for r in RULES]


@cache
def grid(fmt: Format) -> np.ndarray:
    """The value of every non-negative code, in code order."""
    _, mantissa, bias, count = FORMATS[fmt]
    values = []
    for code in range(count):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        values.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


def exponent(amax: float, fmt: Format, rule: Rule) -> int:
    """The block's scale exponent, from the rule as written, in exact fractions."""
    if amax == 0:
        return -127
    largest, mantissa = Fraction(grid(fmt)[-1]), FORMATS[fmt][1]
    A, emax = Fraction(amax), log2(Fraction(grid(fmt)[-1]))
    if rule == "floor":
        e = log2(A) - emax
    elif rule == "even":
        unit = Fraction(2) ** (log2(A) - mantissa)
        e = log2((A / unit + Fraction(1, 2)).__floor__() * unit) - emax
    elif rule == "ceil":
        e = log2(A) + (Fraction(2) ** log2(A) < A) - emax
    else:
        e = log2(A / largest) + (Fraction(2) ** log2(A / largest) < A / largest)
    return max(-127, min(127, e))


def log2(x: Fraction) -> int:
    """floor(log2 x), exactly."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def oracle(x: Tensor, fmt: Format, rule: Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes without sign, signed values and scale exponents of blocks x [N, 32], by brute force."""
    blocks = x.double().numpy()
    exponents = np.array([exponent(a, fmt, rule) for a in np.abs(blocks).max(1)])
    scaled = np.abs(blocks) * np.exp2(-exponents.astype(np.float64))[:, None]
    points = grid(fmt)
    distances = np.abs(np.minimum(scaled, points[-1])[..., None] - points)
    least = distances.min(-1, keepdims=True)
    near = distances == least  # one point, or two at a tie, neighbours: the even code is one of them
    first, count = near.argmax(-1), near.sum(-1)
    codes = first + ((count == 2) & (first % 2 == 1))
    values = np.copysign(points[codes] * np.exp2(exponents.astype(np.float64))[:, None], blocks)
    return codes, values, exponents


def blocks(seed: int, dtype: torch.dtype) -> Tensor:
    """Blocks of every kind: gaussian, heavy-tailed, one giant, ties, powers of two, tiny, zero; 2^-90 to 2^90."""
    gen = torch.Generator().manual_seed(seed)
    normal = torch.randn(400, 32, generator=gen, dtype=torch.float64)
    heavy = torch.randn(400, 32, generator=gen, dtype=torch.float64) ** 5
    giant = torch.randn(100, 32, generator=gen, dtype=torch.float64)
    giant[:, 7] *= 1000
    ties = torch.randint(-2048, 2049, (400, 32), generator=gen).double() / 4
    powers = torch.exp2(torch.randint(-20, 9, (100, 32), generator=gen).double())
    spread = torch.exp2(torch.randint(-90, 90, (1400, 1), generator=gen).double())
    made = torch.cat([normal, heavy, giant, ties, powers]) * spread
    tiny = torch.randn(100, 32, generator=gen, dtype=torch.float64) * 2.0**-128
    return torch.cat([made, tiny, torch.zeros(2, 32, dtype=torch.float64)]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_codes_and_scales_are_the_brute_force_ones(fmt, rule, dtype):
    x = blocks(0, dtype)
    mx = encode(x, fmt, rule)
    codes, values, exponents = oracle(x, fmt, rule)
    signs = np.signbit(x.double().numpy()) << (3 if fmt == "mxfp4" else 7)
    np.testing.assert_array_equal(mx.scales[:, 0].numpy(), exponents + 127)
    np.testing.assert_array_equal(mx.codes.numpy(), codes | signs)
    np.testing.assert_array_equal(decode(mx, torch.float64).numpy(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_a_round_trip_is_within_half_a_step_saturation_aside(fmt, rule, dtype):
    x = blocks(1, dtype)
    mx = encode(x, fmt, rule)
    scale = np.exp2(mx.scales.numpy() - 127.0)
    scaled = np.abs(x.double().numpy()) / scale
    back = np.abs(fake(x, fmt, rule).double().numpy()) / scale
    points = grid(fmt)
    above = np.searchsorted(points, scaled).clip(1, len(points) - 1)
    step = points[above] - points[above - 1]
    beyond = scaled > points[-1]
    if dtype == torch.bfloat16:  # blocks below its subnormals' reach are rounded once more on the way back
        beyond |= (mx.scales.numpy() == 0) & np.ones_like(beyond)
    assert (np.abs(back - scaled) <= step / 2)[~beyond].all()
    if dtype != torch.bfloat16:
        assert (back[beyond] == points[-1]).all()
    assert beyond.any() == (rule in ("floor", "even") or dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_the_nearest_neighbours_of_every_grid_point_and_midpoint(fmt, rule, dtype):
    """Up to five least steps of the input's own format to either side: where arithmetic shortcuts go wrong."""
    points = grid(fmt)
    special = torch.tensor([*points, *((points[1:] + points[:-1]) / 2)], dtype=dtype)
    near, up, down = [special], special, special
    for _ in range(5):
        up, down = torch.nextafter(up, up + 1), torch.nextafter(down, down - 1)
        near += [up, down]
    values = torch.cat(near)
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    x = torch.cat([torch.full((len(values), 1), points[-1], dtype=dtype), values.clamp(-points[-1], points[-1])], 1)
    for power in (-60, 0, 40):
        codes, expected, _ = oracle(x * 2.0**power, fmt, rule)
        assert ((encode(x * 2.0**power, fmt, rule).codes.numpy() & (7 if fmt == "mxfp4" else 127)) == codes).all()
        np.testing.assert_array_equal(fake(x * 2.0**power, fmt, rule).double().numpy(), expected)


def test_every_finite_bfloat16_value_beside_every_leader():
    """Each finite bfloat16 value in a block led by each of 64 magnitudes not below it: the codes are the oracle's."""
    for fmt in FORMATS:
        for leader in leaders():
            x = led_by(leader)
            codes, _, exponents = oracle(x, fmt, "floor")
            mx = encode(x, fmt, "floor")
            assert (mx.scales[:, 0].numpy() == exponents + 127).all()
            assert ((mx.codes.numpy() & (7 if fmt == "mxfp4" else 127)) == codes).all()


def leaders() -> list[float]:
    """64 magnitudes, each with another exponent, mantissas all over."""
    exponents, fractions = range(-126, 126, 4), np.random.default_rng(0).integers(0, 128, 63)
    return [*((1 + f / 128) * 2.0**e for e, f in zip(exponents, fractions, strict=True)), 2.0**127 * 1.5]


def led_by(leader: float) -> Tensor:
    """Blocks [N, 32] whose first element is the leader and that hold, between them, all bfloat16 |v| <= leader that are
    within 2^34 of it (smaller ones are zero in every format).
    """
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    magnitude = every.double().abs()
    kept = every[(magnitude <= leader) & (magnitude >= leader * 2.0**-34)]
    kept = torch.nn.functional.pad(kept, (0, -len(kept) % 31)).view(-1, 31)
    return torch.cat([torch.full((len(kept), 1), leader, dtype=torch.bfloat16), kept], 1)
