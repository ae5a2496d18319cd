"""The forms of `ops.overlap` against its definition: torch and C over blocks, Triton interpreted, memory, levels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nonet import native
from nonet.ops import overlap as api
from nonet.ops import overlap_blocks, overlap_native, overlap_triton
from nonet.ops.overlap import Head, overlap, overlap_definition
from nonet.ops.overlap_blocks import Blocks, log_total
from nonet.ops.overlap_rules import KINDS

ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".peers" / "fla" / "bin" / "python"
WIDE = torch.float64
needs_native = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")


class Case:
    """Random heads, map, temperatures and weights; all in float64, rows of weight 0 among them."""

    def __init__(self, T: int, D: int, E: int, W: int, V: int, seed: int, scale: float = 0.5):
        gen = torch.Generator().manual_seed(seed)
        shapes = [(T, D), (W, D), (T, E), (V, E)]
        self.tensors = [
            torch.randn(*s, generator=gen, dtype=WIDE) * (1 if i % 2 == 0 else scale) for i, s in enumerate(shapes)
        ]
        self.d2t = None if W == V else torch.randperm(V, generator=gen)[:W]
        self.temperatures = tuple((0.5 + 1.5 * torch.rand(2, generator=gen)).tolist())
        weights = torch.rand(T, generator=gen, dtype=WIDE) * (torch.rand(T, generator=gen) < 0.7)
        weights[0] += 0.1
        self.weights = weights

    def heads(self, dtype: torch.dtype) -> tuple[Head, Head, list[Tensor]]:
        h, w, x, y = (t.to(dtype) for t in self.tensors)
        leaves = [h.detach().requires_grad_(), w.detach().requires_grad_()]
        return Head(leaves[0], leaves[1], self.temperatures[0]), Head(x, y, self.temperatures[1]), leaves

    def defined(self, **options) -> list[Tensor]:
        draft, target, leaves = self.heads(WIDE)
        logits = [h.hidden_TD @ h.weight_WD.T for h in (draft, target)]
        out = overlap_definition(*logits, self.d2t, self.weights, temperatures=self.temperatures, **options)
        return [out.mean.detach(), out.rows_T, out.alpha_T, *torch.autograd.grad(2 * out.mean, leaves)]

    def known(self, dtype: torch.dtype, **options) -> list[Tensor]:
        """With the target's logsumexp found before, and only the draft's tokens of its head given."""
        draft, target, leaves = self.heads(dtype)
        rows = target.weight_WD if self.d2t is None else target.weight_WD[self.d2t]
        known = Head(target.hidden_TD, rows, target.temperature, log_total(target))
        out = overlap(draft, known, None, self.weights, **options)
        return [out.mean.detach(), out.rows_T, out.alpha_T, *torch.autograd.grad(2 * out.mean, leaves)]

    def fused(self, dtype: torch.dtype, **options) -> list[Tensor]:
        draft, target, leaves = self.heads(dtype)
        out = overlap(draft, target, self.d2t, self.weights, **options)
        return [out.mean.detach(), out.rows_T, out.alpha_T, *torch.autograd.grad(2 * out.mean, leaves)]


def compare(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Largest difference over largest value, of the loss, rows, acceptances and both gradients. A loss near zero is
    what is left of terms of order one: float32 knows it to 1e-6, whatever its size.
    """
    for name, a, b in zip(("mean", "rows", "alpha", "d hidden", "d head"), got, want, strict=True):
        least = 0.1 if name in ("mean", "rows") else 1e-3
        error = float((a.to(WIDE) - b).abs().max() / b.abs().max().clamp(min=least))
        assert error < tolerance, f"{name}: {error:.1e}"


CASES = st.builds(
    lambda T, D, E, W, extra, seed, scale: Case(T, D, E, W, W + extra, seed, scale),
    T=st.integers(1, 40),
    D=st.integers(1, 70),
    E=st.integers(1, 40),
    W=st.integers(1, 200),
    extra=st.sampled_from([0, 0, 1, 37, 1000]),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.05, 0.3, 0.8]),
)


@settings(max_examples=40, deadline=None)
@given(CASES, st.sampled_from(KINDS), st.integers(1, 70), st.integers(1, 9))
def test_torch_blocks_are_the_definition_at_any_tile_and_block(case, kind, tile, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_blocks, "TILE", tile)
        patch.setattr(overlap_blocks, "BYTES", {"cpu": rows * 8 * (2 * len(case.tensors[1]) + 8 * tile)})
        compare(case.fused(WIDE, kind=kind, native=False), case.defined(kind=kind), 1e-9)


@settings(max_examples=25, deadline=None)
@given(CASES, st.sampled_from(KINDS))
def test_a_logsumexp_found_before_gives_the_same(case, kind):
    compare(case.known(WIDE, kind=kind, native=False), case.defined(kind=kind), 1e-9)
    compare(case.known(torch.float32, kind=kind), case.defined(kind=kind), 1e-5)


@needs_native
@settings(max_examples=60, deadline=None)
@given(CASES, st.sampled_from(KINDS))
def test_c_is_the_definition(case, kind):
    compare(case.fused(torch.float32, kind=kind), case.defined(kind=kind), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("W", "V"), [(9001, 9001), (300, 9001)])
@pytest.mark.parametrize("use_native", [True, False])
def test_several_tiles_and_a_ragged_last_in_float32(W, V, kind, use_native):
    case = Case(35, 48, 33, W, V, seed=3)
    compare(case.fused(torch.float32, kind=kind, native=use_native), case.defined(kind=kind), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind):
    """tv's and the pure overlap's, too; lambda and the fall-back's share are constants by definition, so both are 0."""
    case = Case(4, 5, 3, 6, 11, seed=1)
    draft, target, leaves = case.heads(WIDE)

    def mean() -> Tensor:
        options = {"kind": kind, "eta": 0.0, "fallback": 0.0, "native": False}
        return overlap(draft, target, case.d2t, case.weights, **options).mean

    for leaf, grad in zip(leaves, torch.autograd.grad(mean(), leaves), strict=True):
        slopes, flat = torch.empty_like(leaf).view(-1), leaf.detach().view(-1)
        for i, x in enumerate(flat.tolist()):
            ends = []
            for step in (1e-6, -1e-6):
                flat[i] = x + step
                ends.append(float(mean().detach()))
            flat[i], slopes[i] = x, (ends[0] - ends[1]) / 2e-6
        torch.testing.assert_close(grad, slopes.view_as(grad), atol=1e-8, rtol=1e-6)


ROWS = [(40, 61, 61), (33, 160, 160), (25, 9, 9), (30, 50, 400)]


def rows_in_bfloat16(T: int, W: int, V: int, kind: str, seed: int = 0) -> None:
    """Against the definition on the same rounded logits; gradients to what bfloat16 can carry."""
    case = Case(T, 24, 16, W, V, seed)
    draft, target, leaves = case.heads(torch.bfloat16)
    rows = target.weight_WD if case.d2t is None else target.weight_WD[case.d2t]
    whole = Head(target.hidden_TD.to(WIDE), target.weight_WD.to(WIDE), target.temperature)
    known = None if case.d2t is None else log_total(whole)
    theirs = Head(target.hidden_TD, rows, target.temperature, known)
    assert overlap_native.fits_rows(draft, theirs)
    out = overlap(draft, theirs, None, case.weights, kind=kind)
    got = [out.mean.detach(), out.rows_T, out.alpha_T, *torch.autograd.grad(2 * out.mean, leaves)]

    wide = [x.detach().to(WIDE).requires_grad_() for x in leaves]
    logits = [(h.hidden_TD.detach() @ h.weight_WD.detach().T).to(WIDE) for h in (draft, theirs)]
    rounded = wide[0] @ wide[1].T
    rounded = rounded + (logits[0] - rounded.detach())
    if known is None:
        said = logits[1]
    else:  # one more token of the target holds what the draft's do not
        rest = (known.exp() - (logits[1] / target.temperature).exp().sum(-1)).log() * target.temperature
        said = torch.cat([logits[1], rest[:, None]], -1)
    d2t = None if known is None else torch.arange(W)
    want = overlap_definition(rounded, said, d2t, case.weights, temperatures=case.temperatures, kind=kind)
    defined = [want.mean.detach(), want.rows_T, want.alpha_T, *torch.autograd.grad(2 * want.mean, wide)]
    for i, (a, b) in enumerate(zip(got, defined, strict=True)):
        assert float((a.to(WIDE) - b).norm() / b.norm()) < (1e-4 if i < 3 else 0.02)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "W", "V"), ROWS)
def test_rows_in_bfloat16_are_the_definition(T, W, V, kind, monkeypatch):
    monkeypatch.setattr(overlap_native.RowBlocks, "BYTES", 4 * 176 * 7)  # blocks of a few rows
    rows_in_bfloat16(T, W, V, kind)


@needs_native
@pytest.mark.parametrize("level", native.LEVELS)
def test_every_level_of_processor(level, monkeypatch):
    if level not in native.supported():
        pytest.skip(f"this processor does not have {level}")
    monkeypatch.setattr(native, "library", lambda: native.load(level))
    case = Case(19, 61, 40, 250, 700, seed=5)
    compare(case.fused(torch.float32), case.defined(), 1e-5)
    rows_in_bfloat16(19, 250, 700, "overlap")


@needs_native
def test_threads_change_nothing_but_the_last_bits():
    case, before = Case(19, 61, 40, 250, 700, seed=5), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = case.fused(torch.float32)
            compare(got, case.defined(), 1e-5)
            assert all(torch.equal(a, b) for a, b in zip(got, case.fused(torch.float32), strict=True))
    finally:
        torch.set_num_threads(before)


@needs_native
def test_c_is_really_taken_and_can_be_switched_off(monkeypatch):
    draft, target, _ = Case(3, 4, 4, 5, 5, seed=0).heads(torch.float32)
    assert api._blocks(draft, target, True) is overlap_native.NativeBlocks
    assert api._blocks(draft, target, False) is Blocks
    other = target._replace(hidden_TD=target.hidden_TD.bfloat16(), weight_WD=target.weight_WD.bfloat16())
    assert api._blocks(draft, other, True) is Blocks
    monkeypatch.setattr(native, "library", lambda: None)
    assert api._blocks(draft, target, True) is Blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    """Heads and hidden states rounded first, the definition sees the same numbers."""
    case = Case(9, 32, 32, 40, 90, seed=2)
    case.tensors = [t.to(dtype).to(WIDE) for t in case.tensors]
    got = case.fused(dtype)
    assert got[0].dtype == torch.float32 and got[3].dtype == got[4].dtype == dtype
    compare(got, case.defined(), 3e-2)


@pytest.mark.parametrize("use_native", [True, False])
def test_frozen_parts_get_no_gradient_and_nothing_is_computed_for_them(use_native):
    case = Case(5, 8, 8, 20, 30, seed=4)
    want = case.defined()
    for frozen in (0, 1):
        draft, target, leaves = case.heads(torch.float32)
        leaves[frozen].requires_grad_(False)
        target = target._replace(weight_WD=target.weight_WD.detach().requires_grad_())
        (2 * overlap(draft, target, case.d2t, case.weights, native=use_native).mean).backward()
        assert leaves[frozen].grad is None and target.weight_WD.grad is None
        grad = leaves[1 - frozen].grad
        assert grad is not None
        torch.testing.assert_close(grad.to(WIDE), want[4 - frozen], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not overlap(draft, target, case.d2t, native=use_native).mean.requires_grad


def test_backward_a_second_time_is_refused():
    draft, target, _ = Case(3, 4, 4, 5, 5, seed=0).heads(torch.float32)
    mean = overlap(draft, target).mean
    mean.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward a second time"):
        mean.backward()


MEMORY = """
import re, sys, torch
from nonet.ops.overlap import Head, overlap
torch.set_num_threads(1)
def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
def run(T, V, D=16):
    h, w, x = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True), torch.randn(T, D)
    overlap(Head(h, w), Head(x, w.detach()), native=sys.argv[1] == "native").mean.backward()
run(64, 1000)
before = kib("VmRSS")
run(1024, 60_000)
print((kib("VmHWM") - before) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("form", ["native", "torch"])
def test_no_tensor_of_all_rows_and_all_tokens_exists(form):
    """1,024 rows of 60,000 logits are 234 MiB; the head, its gradient and the block are 30."""
    command = [sys.executable, "-c", MEMORY, form]
    out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 80


# ------------------------------------------------------------------------------------------------------------ Triton

INTERPRETED = """
import torch
import nonet.ops.overlap as api
from nonet.ops.overlap_blocks import Blocks, Head
from nonet.ops.overlap_triton import TritonBlocks
gen = torch.Generator().manual_seed(0)
hq, wq, hp, wp = (torch.randn(*s, generator=gen) / 3 for s in ((7, 32), (500, 32), (7, 32), (9000, 32)))
d2t = torch.randperm(9000, generator=gen)[:500]
for kind in ("overlap", "tv", "kl", "hybrid"):
    found = []
    for form in (Blocks, TritonBlocks):
        api._blocks = lambda *_: form
        h, w = hq.clone().requires_grad_(), wq.clone().requires_grad_()
        out = api.overlap(Head(h, w, 0.8), Head(hp, wp), d2t, kind=kind)
        out.mean.backward()
        found.append((out.rows_T, out.alpha_T, h.grad, w.grad))
    print(kind, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found)))
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from nonet.ops.overlap_triton import WIDTH, kernels
for kernel, pointers in ((kernels().sums, "P Q OUT"), (kernels().slopes, "P Q OWN LOG_SHORT TARGET")):
    numbers = [n for n in kernel.arg_names if n not in pointers.split() and n != "WIDTH"]
    signature = dict.fromkeys(pointers.split(), "*fp32") | dict.fromkeys(numbers, "i32") | {"WIDTH": "constexpr"}
    source = ASTSource(kernel, signature={n: signature[n] for n in kernel.arg_names}, constexprs={"WIDTH": WIDTH})
    print("ptx", len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]))
"""


def with_triton(code: str, **environment: str) -> list[str]:
    if not TRITON.exists():
        pytest.skip("needs .peers/fla, where triton is; run `make peers`")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NONET_NATIVE": "0", **environment}
    out = subprocess.run([TRITON, "-c", code], capture_output=True, text=True, env=env, timeout=240)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()


def test_triton_interpreted_agrees_with_torch():
    lines = with_triton(INTERPRETED, TRITON_INTERPRET="1")
    assert [line.split()[0] for line in lines] == list(KINDS)
    assert max(float(x) for line in lines for x in line.split()[1:]) < 1e-5


def test_triton_compiles_for_a_gpu_that_is_not_there():
    lines = with_triton(COMPILED)
    assert len(lines) == 2 and all(re.fullmatch(r"ptx \d{4,}", line) for line in lines)


def test_triton_says_why_it_is_not_taken():
    assert overlap_triton.reason(torch.ones(1)) == "tensors are on cpu, Triton needs a CUDA device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_triton_on_a_gpu_is_the_definition(kind):
    case = Case(70, 64, 48, 3000, 9000, seed=6)
    want = case.defined(kind=kind)
    case.tensors = [t.cuda() for t in case.tensors]
    assert case.d2t is not None
    case.d2t, case.weights = case.d2t.cuda(), case.weights.cuda()
    compare([x.cpu() for x in case.fused(torch.float32, kind=kind)], want, 1e-4)
