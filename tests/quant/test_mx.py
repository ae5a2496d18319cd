"""MX codes by hand, the edges of the definition, what holds for every block, and the fast path against the slow one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nonet.quant import mx as module
from nonet.quant.formats import ELEMENTS
from nonet.quant.mx import MX, Format, Rule, block_scales, decode, encode, fake, saturated
from nonet.quant.mx_slow import code_values, decode_slow, encode_slow, fake_slow
from nonet.types import UserError

FORMATS: tuple[Format, ...] = ("mxfp4", "mxfp8", "mxfp8_e5m2")
RULES: tuple[Rule, ...] = ("floor", "even", "ceil", "rceil")
CASES = [(f, r) for f in FORMATS for r in RULES]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
NAN, INF = math.nan, math.inf


def block(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One block that begins with these values, zeros after."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=dtype)


def bits(x: Tensor) -> Tensor:
    """For comparing to the last bit: signed zeros differ, all NaN are one."""
    x = x.masked_fill(x.isnan(), NAN)
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


# --------------------------------------------------------------------- by hand

# element before -> code after, for a block whose scale is 1
E2M1 = [
    *[(6, 7), (-6, 15), (0, 0), (-0.0, 8), (0.5, 1), (1, 2), (1.5, 3), (2, 4), (3, 5), (4, 6)],
    *[(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6)],  # ties, to the even code
    *[(-0.25, 8), (-0.75, 10), (-5, 14), (0.26, 1), (0.74, 1), (5.01, 7), (2.51, 5), (-3.49, 13)],
    *[(7.9, 7), (-7.9, 15)],  # saturated
]
E4M3 = [
    *[(448, 0x7E), (-448, 0xFE), (1, 0x38), (-0.0, 0x80), (1.125, 0x39), (2.0**-6, 8), (2.0**-9, 1)],
    *[(1.0625, 0x38), (1.1875, 0x3A), (2.0**-10, 0), (3 * 2.0**-10, 2), (15 * 2.0**-10, 8)],  # ties
    *[(432, 0x7E), (431, 0x7D), (416, 0x7D), (500, 0x7E), (-511, 0xFE)],
]
E5M2 = [
    *[(57344, 0x7B), (-57344, 0xFB), (1, 0x3C), (2.0**-14, 4), (2.0**-16, 1)],
    *[(1.125, 0x3C), (1.375, 0x3E), (2.0**-17, 0), (3 * 2.0**-17, 2), (7 * 2.0**-17, 4)],  # ties
    *[(65000, 0x7B)],
]
ANCHOR = {"mxfp4": 4.0, "mxfp8": 256.0, "mxfp8_e5m2": 32768.0}  # alone, it gives scale 1 by the floor rule


@pytest.mark.parametrize(
    ("fmt", "before", "code"),
    [(f, *pair) for f, table in zip(FORMATS, (E2M1, E4M3, E5M2), strict=True) for pair in table],
)
def test_elements_by_hand(fmt, before, code):
    mx = encode(block(before, ANCHOR[fmt]), fmt, "floor")
    assert mx.scales.tolist() == [127]
    assert mx.codes[0].item() == code


def test_the_table_of_e2m1_is_what_its_codes_are_worth():
    assert (*module.E2M1, *(-v for v in module.E2M1)) == tuple(code_values(ELEMENTS["mxfp4"]))


# format, largest magnitude -> exponent by floor, even, ceil, rceil
SCALES = [
    *[("mxfp4", 4, 0, 0, 0, 0), ("mxfp4", 6, 0, 0, 1, 0), ("mxfp4", 6.01, 0, 0, 1, 1), ("mxfp4", 6.99, 0, 0, 1, 1)],
    *[("mxfp4", 7, 0, 1, 1, 1), ("mxfp4", 3, -1, -1, 0, -1), ("mxfp4", 3.5, -1, 0, 0, 0), ("mxfp4", 8, 1, 1, 1, 1)],
    *[("mxfp8", 448, 0, 0, 1, 0), ("mxfp8", 449, 0, 0, 1, 1), ("mxfp8", 495, 0, 0, 1, 1), ("mxfp8", 496, 0, 1, 1, 1)],
    *[("mxfp8", 256, 0, 0, 0, 0), ("mxfp8", 225, -1, -1, 0, 0), ("mxfp8", 1, -8, -8, -8, -8)],
    *[("mxfp8_e5m2", 57344, 0, 0, 1, 0), ("mxfp8_e5m2", 61440, 0, 1, 1, 1), ("mxfp8_e5m2", 2.0**-20, *[-35] * 4)],
]


@pytest.mark.parametrize(("fmt", "amax", "floor", "even", "ceil", "rceil"), SCALES)
@pytest.mark.parametrize("sign", [1, -1])
def test_scales_by_hand(fmt, amax, sign, floor, even, ceil, rceil):
    for dtype in (torch.float32, torch.float64):
        x = block(amax / 32, sign * amax, dtype=dtype)
        assert [block_scales(x, fmt, r).item() - 127 for r in RULES] == [floor, even, ceil, rceil]


def test_rceil_looks_at_the_last_bit_of_the_magnitude():
    for fmt, largest in zip(FORMATS, (6.0, 448.0, 57344.0), strict=True):
        for power in (-100, -3, 0, 60, 100):
            just = torch.tensor(largest * 2.0**power)
            for amax, e in ((just, power), (torch.nextafter(just, just * 2), power + 1)):
                assert block_scales(block(amax.item()), fmt, "rceil").item() == e + 127


# ---------------------------------------------------------------------- edges


@pytest.mark.parametrize(("fmt", "rule"), CASES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_poisons_its_block_alone(fmt, rule, poison, dtype):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    healthy = encode(x, fmt, rule)
    x[1, 40] = poison
    mx = encode(x, fmt, rule)
    assert mx.scales[1, 1] == 255
    assert not mx.codes[1, 32:].any()
    for made in (decode(mx, dtype), fake(x, fmt, rule), fake_slow(x, fmt, rule)):
        assert made[1, 32:].isnan().all()
        made[1, 32:] = decode(healthy, dtype)[1, 32:]
        assert torch.equal(bits(made), bits(decode(healthy, dtype)))


@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_zeros_keep_their_signs_and_scale_byte_zero(fmt, rule):
    x = torch.zeros(32)
    x[::3] = -0.0
    mx = encode(x, fmt, rule)
    assert mx.scales.tolist() == [0]
    assert ((mx.codes != 0) == x.signbit()).all()
    for made in (decode(mx), fake(x, fmt, rule)):
        assert torch.equal(bits(made), bits(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_scale_is_two_to_the_minus_127(dtype):
    """Below it blocks share byte 0 and lose their small elements; nothing is halved, nothing overflows."""
    x = block(2.0**-126, -(2.0**-127), 2.0**-128, 2.0**-129, 3 * 2.0**-129, 2.0**-149, dtype=dtype)
    mx = encode(x, "mxfp4", "floor")
    assert mx.scales.tolist() == [0]
    assert mx.codes[:6].tolist() == [4, 10, 1, 0, 2, 0]
    assert decode(mx, dtype)[:5].tolist() == [2.0**-126, -(2.0**-127), 2.0**-128, 0, 2.0**-127]
    assert torch.equal(bits(fake(x)), bits(decode(mx, dtype)))


def test_the_largest_blocks_may_round_to_infinity_in_float32_but_not_in_float64():
    x = block(3.4e38, 1e38)
    assert decode(encode(x, "mxfp4", "floor"))[:2].tolist() == [6 * 2.0**125, 2 * 2.0**125]
    mx = encode(x, "mxfp4", "even")
    assert decode(mx)[0] == INF
    assert decode(mx, torch.float64)[0] == 2.0**128
    assert fake(x, "mxfp4", "even")[:2].tolist() == [INF, 2.0**126]


def test_float64_beyond_the_largest_scale_saturates():
    for rule in RULES:
        mx = encode(block(1e300, 2.0**127, dtype=torch.float64), "mxfp4", rule)
        assert mx.scales.tolist() == [254]
        assert mx.codes[:2].tolist() == [7, 2]
        assert fake(block(1e300, dtype=torch.float64), "mxfp4", rule)[0] == 6 * 2.0**127


def test_float64_is_rounded_once():
    """A hair above a tie: by way of float32 it would be the tie itself."""
    hair = 2.0**-45
    for fmt, tie, up in zip(FORMATS, (2.5, 1.0625, 1.125), (3.0, 1.125, 1.25), strict=True):
        x = block(tie + hair, tie, ANCHOR[fmt], dtype=torch.float64)
        for made in (decode(encode(x, fmt), torch.float64), fake(x, fmt)):
            assert made[0] == up
            assert made[1] < up


@pytest.mark.parametrize("shape", [(), (31,), (4, 48), (32, 3)])
def test_a_last_dimension_that_makes_no_blocks_is_refused_by_shape(shape):
    for do in (encode, fake, block_scales, saturated):
        with pytest.raises(ValueError, match="multiple of 32") as refusal:
            do(torch.zeros(shape))
        assert str(shape) in str(refusal.value)


def test_other_mistakes_are_refused_by_name():
    x = torch.zeros(32)
    functions: list[Callable[..., Any]] = [encode, fake, fake_slow, block_scales, saturated]
    for do in functions:
        with pytest.raises(ValueError, match=r"torch.float16.*torch.bfloat16"):
            do(x.half())
        with pytest.raises(ValueError, match="'fp4' is no MX format"):
            do(x, "fp4")
        with pytest.raises(ValueError, match="'round' is no scale rule"):
            do(x, "mxfp4", "round")
    with pytest.raises(ValueError, match="share one scale"):
        decode(MX(torch.zeros(64, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), "mxfp4"))


@pytest.mark.parametrize("do", [fake, fake_slow])
def test_with_a_name_what_is_not_finite_is_refused(do):
    x = torch.ones(2, 64)
    do(x, "mxfp4", "floor", "layers.3.w1")
    for poison in (NAN, INF, -INF):
        x[1, 33] = poison
        with pytest.raises(UserError, match=r"^layers\.3\.w1 holds NaN or Inf"):
            do(x, "mxfp4", "floor", "layers.3.w1")


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,)])
def test_nothing_is_quantised_to_nothing(shape):
    x = torch.zeros(shape)
    mx = encode(x)
    assert mx.codes.shape == decode(mx).shape == fake(x).shape == saturated(x).shape == shape
    assert mx.scales.shape == (*shape[:-1], shape[-1] // 32)


# -------------------------------------------------------------- for every block

integers = st.lists(st.integers(-(2**20), 2**20), min_size=32, max_size=32)
floats = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32)
cases = st.sampled_from(CASES)


@given(values=floats, case=cases)
def test_quantising_twice_is_quantising_once(values, case):
    once = fake(torch.tensor(values), *case)
    assert torch.equal(fake(once, *case), once)


@given(values=floats, case=cases)
def test_signs_pass_through(values, case):
    x = torch.tensor(values)
    assert torch.equal(bits(fake(-x, *case)), bits(-fake(x, *case)))
    assert torch.equal(fake(x, *case).signbit(), x.signbit())


@given(values=integers, power=st.integers(-60, 60), case=cases)
def test_powers_of_two_pass_through(values, power, case):
    x = torch.tensor(values, dtype=torch.float32)
    scaled = x * 2.0**power
    assert torch.equal(fake(scaled, *case), fake(x, *case) * 2.0**power)
    if x.any():
        assert block_scales(scaled, *case).item() == block_scales(x, *case).item() + power
    assert torch.equal(encode(scaled, *case).codes, encode(x, *case).codes)


@given(values=floats, case=cases, order=st.permutations(range(32)))
def test_the_order_within_a_block_is_nothing_to_it(values, case, order):
    x = torch.tensor(values)
    assert torch.equal(bits(fake(x[list(order)], *case)), bits(fake(x, *case)[list(order)]))


@given(values=floats, more=floats, case=cases)
def test_blocks_are_nothing_to_each_other(values, more, case):
    a, b = torch.tensor(values), torch.tensor(more)
    apart = torch.cat([fake(a, *case), fake(b, *case)])
    assert torch.equal(bits(fake(torch.cat([a, b]), *case)), bits(apart))


@given(values=floats, case=cases)
def test_more_is_never_less(values, case):
    """Rounding is monotone within a block."""
    x = torch.tensor(values).sort().values
    assert (fake(x, *case).diff() >= 0).all()


@given(values=floats, case=cases)
def test_saturated_is_where_the_largest_code_stands_for_more(values, case):
    x = torch.tensor(values)
    mx = encode(x, *case)
    limit = decode(
        MX(torch.full((32,), {"mxfp4": 7, "mxfp8": 0x7E, "mxfp8_e5m2": 0x7B}[case[0]]).byte(), mx.scales, mx.fmt)
    )
    assert torch.equal(saturated(x, *case), x.abs() > limit)
    if case[1] in ("ceil", "rceil"):
        assert not saturated(x, *case).any()


# --------------------------------------------------------------- fast and slow


def mixed(dtype: torch.dtype, rows: int = 150) -> Tensor:
    """More than one part: gaussian and heavy-tailed blocks at scales from 2^-130 to 2^120, zeros, ties."""
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 64, 32, generator=gen, dtype=torch.float64)
    x[::3] = x[::3] ** 7
    x[1::3] = (x[1::3] * 16).round() / 4
    x[:, ::9] *= torch.exp2(torch.randint(-130, 100, (rows, 8, 1), generator=gen).double())
    x[:, 5] = 0
    return x.clamp(-3e38, 3e38).to(dtype).reshape(rows, 2048)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_the_fast_paths_have_the_bits_of_the_slow_ones(fmt, rule, dtype):
    x = mixed(dtype)
    mx, slow = encode(x, fmt, rule), encode_slow(x, fmt, rule)
    assert torch.equal(mx.codes, slow.codes)
    assert torch.equal(mx.scales, slow.scales)
    assert torch.equal(bits(decode(mx, dtype)), bits(decode_slow(mx, dtype)))
    assert torch.equal(bits(fake(x, fmt, rule)), bits(fake_slow(x, fmt, rule)))
    assert torch.equal(bits(fake_slow(x, fmt, rule)), bits(decode_slow(slow, dtype)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_one_pass_in_c_has_the_bits_of_the_torch_way(fmt, rule, dtype, monkeypatch):
    if module.library() is None:
        pytest.skip("no native library")
    x = mixed(dtype).clamp(-1e9, 1e9)
    with monkeypatch.context() as patch:
        patch.setattr(module, "library", lambda: None)
        expected = fake(x, fmt, rule)
    monkeypatch.setattr(module, "_fake_part", None)  # whoever enters it fails
    assert torch.equal(bits(fake(x, fmt, rule)), bits(expected))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.equal(bits(fake(x, fmt, rule)), bits(expected))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_under_every_scale_decodes_alike(fmt, dtype):
    """Also codes that `encode` never writes: torch's own float8 says what they are worth."""
    codes = torch.arange(16 if fmt == "mxfp4" else 256, dtype=torch.uint8).view(-1, 16).repeat(1, 2)
    scales = torch.arange(256, dtype=torch.uint8)
    every = codes.flatten().repeat(256, 1)
    mx = MX(every, scales[:, None].expand(256, every.shape[1] // 32).contiguous(), fmt)
    assert torch.equal(bits(decode(mx, dtype)), bits(decode_slow(mx, dtype)))
    if fmt != "mxfp4":
        eight = torch.float8_e4m3fn if fmt == "mxfp8" else torch.float8_e5m2
        assert torch.equal(bits(decode(mx)[127]), bits(every[127].view(eight).float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_fast_paths_do_the_work_unless_they_are_off(fmt, dtype, monkeypatch):
    """Ordinary tensors never fall back; with NONET_MX_FAST=0 only the slow twins are entered."""
    monkeypatch.delenv("NONET_MX_FAST", raising=False)
    x = mixed(dtype).clamp(-1e9, 1e9)
    mx, expected = encode(x, fmt), fake(x, fmt)
    with monkeypatch.context() as patch:
        for name in ("encode_slow", "decode_slow", "fake_slow"):
            patch.setattr(module, name, None)
        assert torch.equal(fake(x, fmt), expected)
        assert torch.equal(decode(encode(x, fmt), dtype), expected)
    for name in ("_encode_part", "_code_values", "_fake_part", "_fake_native"):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setenv("NONET_MX_FAST", "0")
    assert torch.equal(fake(x, fmt), expected)
    assert torch.equal(encode(x, fmt).codes, mx.codes)
    assert torch.equal(decode(mx, dtype), expected)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("native", (True, False))
def test_blocks_too_large_for_the_fast_path_take_the_slow_one(fmt, native, monkeypatch):
    if not native:
        monkeypatch.setattr(module, "library", lambda: None)
    x = mixed(torch.float32)[:4] * 2.0**60
    for power in range(0, 60, 3):
        huge = (x * 2.0**power).clamp(-3e38, 3e38)
        assert torch.equal(bits(fake(huge, fmt)), bits(fake_slow(huge, fmt)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_strides_are_nothing_to_it(fmt):
    x = torch.randn(96, 4, 64, generator=torch.Generator().manual_seed(1))
    views = [x.transpose(0, 1), x[:, :, 32:], x[::2], x.permute(2, 1, 0), x.expand(2, 96, 4, 64), x[:, 1]]
    for view in views:
        whole = view.contiguous()
        kept = whole.clone()
        assert torch.equal(fake(view, fmt), fake(whole, fmt))
        assert fake(view, fmt).is_contiguous()
        mx, expected = encode(view, fmt), encode(whole, fmt)
        assert torch.equal(mx.codes, expected.codes)
        assert torch.equal(mx.scales, expected.scales)
        assert mx.codes.is_contiguous()
        assert torch.equal(whole, kept)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bfloat16_is_what_its_float32_copy_is(fmt):
    x = mixed(torch.bfloat16)
    mx, wide = encode(x, fmt), encode(x.float(), fmt)
    assert torch.equal(mx.codes, wide.codes)
    assert torch.equal(mx.scales, wide.scales)
    assert torch.equal(bits(fake(x, fmt)), bits(fake(x.float(), fmt).bfloat16()))


def test_no_graph_is_recorded():
    x = torch.randn(2, 32, requires_grad=True)
    assert not fake(x).requires_grad
    assert not decode(encode(x)).requires_grad
