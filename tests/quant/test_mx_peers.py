"""Bit for bit against others: torchao in all four rules, microxcaling with ties to even, ggml's dequantiser (pack)."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nonet.quant.mx import Format, Rule, decode, encode, fake

FORMATS: tuple[Format, ...] = ("mxfp4", "mxfp8", "mxfp8_e5m2")
RULES: tuple[Rule, ...] = ("floor", "even", "ceil", "rceil")
CASES: list[tuple[Format, Rule]] = [(f, r) for f in FORMATS for r in RULES]
MICROXCALING = Path(__file__).parents[2] / ".peers" / "microxcaling"


# ------------------------------------------------------------------- the data


def every_bfloat16() -> Tensor:
    """Every finite bfloat16 value, 32 consecutive bit patterns a block: all blocks of one binade, both signs."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 32)
    return patterns[patterns.isfinite().all(-1)]


def led(exponent: int, fraction: int) -> Tensor:
    """Every finite bfloat16 value not beyond the leader (1 + fraction / 128) * 2^exponent, in blocks it leads."""
    leader = (1 + fraction / 128) * 2.0**exponent
    every = every_bfloat16().flatten()
    kept = every[every.abs() <= leader]
    kept = torch.nn.functional.pad(kept, (0, -len(kept) % 31)).view(-1, 31)
    return torch.cat([torch.full((len(kept), 1), leader, dtype=torch.bfloat16), kept], 1)


# 64 leaders: every fourth binade that bfloat16 has, mantissas all over, the rules' thresholds among them
LEADERS = [*((-124 + 4 * i, (37 * i) % 128) for i in range(60)), (0, 64), (0, 96), (1, 112), (127, 127)]


def drawn(seed: int) -> list[Tensor]:
    """float32 tensors: gaussian, heavy-tailed, a giant in each block, at scales from 2^-100 to 2^100."""
    gen = torch.Generator().manual_seed(seed)
    normal = torch.randn(512, 1024, generator=gen)
    ratio = torch.randn(512, 1024, generator=gen) / torch.randn(512, 1024, generator=gen).abs().clamp(min=1e-6)
    giant = torch.where(torch.rand(512, 1024, generator=gen) < 1 / 64, normal * 300, normal)
    spread = torch.exp2(torch.randint(-100, 100, (512, 1), generator=gen).float())
    return [normal, ratio, giant, normal * spread]


# -------------------------------------------------------------------- torchao


@pytest.fixture(scope="module")
def torchao() -> Any:
    """`quantise(x, fmt, rule)` -> (codes, scales) by torchao."""
    reason = "torchao is not installed: .venv/bin/pip install --constraint constraints.txt torchao==0.18.0"
    pytest.importorskip("torchao", reason=reason)
    config = importlib.import_module("torchao.prototype.mx_formats.config")
    to_mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
    dtypes = dict(zip(FORMATS, (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e5m2), strict=True))

    def quantise(x: Tensor, fmt: Format, rule: Rule) -> tuple[Tensor, Tensor]:
        scales, codes = to_mx(x, dtypes[fmt], 32, config.ScaleCalculationMode(rule))
        codes = codes.view(torch.uint8)
        if fmt == "mxfp4":  # two to a byte, the first in the low nibble
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return codes, scales.view(torch.uint8)

    return quantise


def assert_same(torchao: Any, x: Tensor, fmt: Format, rule: Rule) -> None:
    """Scales always; codes wherever torchao's codes mean what its scale says, which at scale byte 0 they do not."""
    codes, scales = torchao(x, fmt, rule)
    mx = encode(x, fmt, rule)
    assert torch.equal(mx.scales, scales)
    kept = scales != 0
    assert torch.equal(mx.codes.unflatten(-1, (-1, 32))[kept], codes.unflatten(-1, (-1, 32))[kept])


@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_torchao_on_every_bfloat16_value_under_64_scales(torchao, fmt, rule):
    assert_same(torchao, every_bfloat16(), fmt, rule)
    assert len(set(LEADERS)) == 64
    for exponent, fraction in LEADERS:
        assert_same(torchao, led(exponent, fraction), fmt, rule)


@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_torchao_on_drawn_tensors(torchao, fmt, rule):
    for x in drawn(0):
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(torchao, x.to(dtype), fmt, rule)


def test_torchao_on_zeros_and_nan(torchao):
    x = torch.zeros(2, 32)
    x[0, ::2] = -0.0
    x[1, 3] = float("nan")
    for fmt, rule in CASES:
        codes, scales = torchao(x, fmt, rule)
        mx = encode(x, fmt, rule)
        assert torch.equal(mx.scales, scales)
        assert scales.flatten().tolist() == [0, 255]
        assert torch.equal(mx.codes[0], codes[0])


def test_what_torchao_does_below_the_smallest_scale_and_with_inf(torchao):
    """The two places where we differ on purpose: see the module's docstring. A torchao that changes shows here."""
    x = torch.zeros(2, 32)
    x[0, :2] = torch.tensor([2.0**-126, 2.0**-127])
    x[1, :2] = torch.tensor([float("inf"), 1.0])
    codes, scales = torchao(x, "mxfp4", "floor")
    assert scales.flatten().tolist() == [0, 253]
    assert codes[0, :2].tolist() == [2, 1]  # 2^-127 and 2^-128: half
    assert torchao(x[:1], "mxfp4", "rceil")[0][0, :2].tolist() == [0, 0]
    mx = encode(x)
    assert mx.scales.flatten().tolist() == [0, 255]
    assert mx.codes[0, :2].tolist() == [4, 2]


# --------------------------------------------------------------- microxcaling


@pytest.fixture(scope="module")
def microxcaling() -> ModuleType:
    if not (MICROXCALING / "mx" / "mx_ops.py").exists():
        pytest.skip("microxcaling is not on PyPI: clone github.com/microsoft/microxcaling into .peers/microxcaling")
    sys.path.insert(0, os.fspath(MICROXCALING))
    try:
        return importlib.import_module("mx.mx_ops")
    finally:
        sys.path.remove(os.fspath(MICROXCALING))


NAMES = {"mxfp4": "fp4_e2m1", "mxfp8": "fp8_e4m3", "mxfp8_e5m2": "fp8_e5m2"}


@pytest.mark.parametrize("fmt", FORMATS)
def test_microxcaling_with_ties_to_even(microxcaling, fmt):
    """Its scale rule is floor. It quantises in float32 whatever the input."""
    tensors = [*drawn(1), *(x.bfloat16().float() for x in drawn(2)), every_bfloat16().float()]
    tensors += [led(e, f).float() for e, f in LEADERS[::8]]
    for x in tensors:
        theirs = microxcaling._quantize_mx(x, 8, NAMES[fmt], axes=[-1], block_size=32, round="even")
        assert torch.equal(fake(x, fmt, "floor"), theirs)
        assert torch.equal(decode(encode(x, fmt, "floor")), theirs)
