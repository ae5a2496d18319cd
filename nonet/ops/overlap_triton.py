"""Blocks of `ops.overlap` on a GPU: logits and their products by torch, one pass over them each way by Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from nonet.ops.overlap_blocks import Blocks
from nonet.ops.overlap_rules import Measures, Push

WIDTH = 4096  # tokens a program takes at a time


def reason(x: Tensor) -> str:
    """Why tensors like x cannot go through Triton, in one sentence; empty if they can."""
    if x.device.type != "cuda":
        return f"tensors are on {x.device.type}, Triton needs a CUDA device"
    if x.dtype == torch.float64:
        return "float64 is for checks, which torch does"
    return "" if find_spec("triton") is not None else "the package triton is not installed"


class TritonBlocks(Blocks):
    """Sums in float32, whatever the inputs are."""

    def sums(self, log_p_RW: Tensor, log_q_RW: Tensor) -> Measures:
        R, W = log_p_RW.shape
        found = log_p_RW.new_empty(5, R)
        kernels().sums[(R,)](log_p_RW, log_q_RW, found, R, W, WIDTH)
        return Measures(*found)

    def descend(self, at: slice, push: Push) -> None:
        """As in `Blocks`; the slopes take the place of log q."""
        h_RD, w = self.draft.hidden_TD[at], self.draft.weight_WD
        R, W = len(h_RD), len(w)
        log_p, slopes = self.log_p[:R], self.log_q[:R]
        kernels().slopes[(R,)](log_p, slopes, *(x.to(slopes.dtype).contiguous() for x in push), W, WIDTH)
        if self.d_hidden_TD is not None:
            self.d_hidden_TD[at] = slopes.to(w.dtype) @ w
        if self.d_weight_WD is not None:
            self.d_weight_WD += slopes.to(w.dtype).T @ h_RD


@cache
def kernels() -> SimpleNamespace:
    """The compiled kernels by name: a program a row of [R, W]. Triton is imported here, and only here."""
    global tl  # Triton looks names up among a kernel's globals
    import triton
    import triton.language as tl

    @triton.jit
    def sums(P, Q, OUT, R, W, WIDTH: tl.constexpr):
        row = tl.program_id(0)
        top, both, short, missing, mass, divergence = float("-inf"), 0.0, 0.0, 0.0, 0.0, 0.0
        for start in range(0, W, WIDTH):
            i = start + tl.arange(0, WIDTH)
            inside = i < W
            log_p = tl.load(P + row * W + i, mask=inside, other=float("-inf"))
            log_q = tl.load(Q + row * W + i, mask=inside, other=float("-inf"))
            least = tl.minimum(log_p, log_q)
            higher = tl.maximum(top, tl.max(least, 0))
            e, p, down = tl.exp(least - higher), tl.exp(log_p), tl.exp(top - higher)
            both = both * down + tl.sum(e, 0)
            short = short * down + tl.sum(tl.where(log_q < log_p, e, 0.0), 0)
            missing += tl.sum(tl.where(log_q < log_p, p - tl.exp(log_q), 0.0), 0)
            mass += tl.sum(p, 0)
            divergence += tl.sum(tl.where(inside, p * (log_p - log_q), 0.0), 0)
            top = higher
        tl.store(OUT + row, top + tl.log(both))
        tl.store(OUT + R + row, short / both)
        tl.store(OUT + 2 * R + row, missing)
        tl.store(OUT + 3 * R + row, mass)
        tl.store(OUT + 4 * R + row, divergence)

    @triton.jit
    def slopes(P, Q, OWN, LOG_SHORT, TARGET, W, WIDTH: tl.constexpr):
        row = tl.program_id(0)
        own, log_short, target = tl.load(OWN + row), tl.load(LOG_SHORT + row), tl.load(TARGET + row)
        for start in range(0, W, WIDTH):
            i = start + tl.arange(0, WIDTH)
            log_p = tl.load(P + row * W + i, mask=i < W, other=0.0)
            log_q = tl.load(Q + row * W + i, mask=i < W, other=0.0)
            slope = own * tl.exp(log_q) - target * tl.exp(log_p)
            slope -= tl.where(log_q < log_p, tl.exp(log_q + log_short), 0.0)
            tl.store(Q + row * W + i, slope, mask=i < W)

    return SimpleNamespace(sums=sums, slopes=slopes)
