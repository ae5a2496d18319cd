"""Attention of an unrolled draft layer (k3 section 3.5): the same rows, step after step, each step from the last one's
outputs.

At step s, row t sees the first step's rows up to t, as in any causal layer, and of each step 2..s row t alone: its own
chain. So there are T + s - 1 scores a query, of which s - 1 are rowwise dot products; one softmax over all of them.

    l_t = log(sum_j<=t e^(q_t k1_j) + sum_i e^(q_t ki_t))
    o_t = sum_j<=t e^(q_t k1_j - l_t) v1_j + sum_i e^(q_t ki_t - l_t) vi_t

Computed in blocks of rows that are found again in the backward pass, so that only o and l are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128  # of a block: of its scores, half a block's square is masked away

Ranges = Sequence[tuple[int, int]]


def unrolled_attention(
    q_BHTK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, ranges: Ranges | None = None
) -> Tensor:
    """[B, H, T, V] of the last step's queries.

    keys, values: of every step, [B, G, >= T, K] and [..., V], the first step's first and this one's last; G divides H.
    ranges: of documents that do not see each other, (first row, row after the last); None: all rows are one.
    """
    T = q_BHTK.shape[2]
    cut = [(0, T)] if ranges is None else [(a, min(b, T)) for a, b in ranges if a < T]
    return _Unrolled.apply(q_BHTK, scale, cut, len(keys), *keys, *values)  # pyright: ignore[reportReturnType]


def unrolled_attention_definition(
    q_BHTK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, ranges: Ranges | None = None
) -> Tensor:
    """The same with a mask over T x steps keys, by autograd."""
    T, H, G = q_BHTK.shape[2], q_BHTK.shape[1], keys[0].shape[1]
    document_T = torch.zeros(T, dtype=torch.int64)
    for i, (a, b) in enumerate(ranges or ()):
        document_T[a:b] = i
    first_TT = torch.ones(T, T, dtype=torch.bool).tril() & (document_T[:, None] == document_T)
    mask = torch.cat([first_TT, *[torch.eye(T, dtype=torch.bool)] * (len(keys) - 1)], -1)
    k, v = (torch.cat([x[:, :, :T] for x in xs], 2).repeat_interleave(H // G, 1) for xs in (keys, values))
    scores = (q_BHTK @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


class _Unrolled(torch.autograd.Function):
    """Rows of query heads that share a key head lie together: [B, G, H / G, R, K]. Sums in float32 at least."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, scale: float, ranges: Ranges, steps: int, *kept: Tensor) -> Tensor:
        tensors = _Tensors(q_BHTK, kept[:steps], kept[steps:], scale)
        B, H, T, _ = q_BHTK.shape
        out_BGhTV = tensors.q.new_empty(B, tensors.groups, H // tensors.groups, T, kept[-1].shape[-1])
        lse_BGhT = tensors.q.new_empty(out_BGhTV.shape[:-1])
        for a, b, start in _blocks(ranges):
            causal, own = tensors.scores(a, b, start)
            top = torch.maximum(causal.amax(-1), own.amax(-1))
            causal.sub_(top.unsqueeze(-1)).exp_()
            own.sub_(top.unsqueeze(-1)).exp_()
            total = causal.sum(-1) + own.sum(-1)
            out = _product(causal, tensors.v[0][:, :, start:b])
            for i, v in enumerate(tensors.v[1:]):
                out.addcmul_(own[..., i : i + 1], v[:, :, None, a:b])
            out_BGhTV[:, :, :, a:b] = out.div_(total.unsqueeze(-1))
            lse_BGhT[:, :, :, a:b] = top + total.log()
        ctx.save_for_backward(q_BHTK, out_BGhTV, lse_BGhT, *kept)
        ctx.scale, ctx.ranges, ctx.steps = scale, ranges, steps
        return out_BGhTV.view(B, H, T, -1).to(q_BHTK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BHTK, out, lse, *kept = ctx.saved_tensors
        tensors = _Tensors(q_BHTK, kept[: ctx.steps], kept[ctx.steps :], ctx.scale)
        d_out = d_out.view_as(out).to(out.dtype)
        shared_BGhT = (d_out * out).sum(-1)
        d_q = torch.empty_like(tensors.q)
        d_k, d_v = ([torch.zeros_like(x, dtype=out.dtype) for x in xs] for xs in (tensors.k, tensors.v))
        for a, b, start in _blocks(ctx.ranges):
            here = (slice(None), slice(None), slice(None), slice(a, b))
            rows, q = d_out[here], tensors.q[here]
            minus, mean = lse[here].unsqueeze(-1), shared_BGhT[here].unsqueeze(-1)
            causal, own = tensors.scores(a, b, start)
            causal.sub_(minus).exp_()
            d_v[0][:, :, start:b] += _transposed(causal, rows)
            causal *= _product(rows, tensors.v[0][:, :, start:b].mT).sub_(mean)
            d_k[0][:, :, start:b] += _transposed(causal, q)
            d_rows = _product(causal, tensors.k[0][:, :, start:b])
            own.sub_(minus).exp_()
            for i in range(1, ctx.steps):
                weight, k, v = own[..., i - 1 : i], tensors.k[i][:, :, None, a:b], tensors.v[i][:, :, None, a:b]
                slope = weight * ((rows * v).sum(-1, keepdim=True) - mean)
                d_v[i][:, :, a:b] = (weight * rows).sum(2)
                d_k[i][:, :, a:b] = (slope * q).sum(2)
                d_rows.addcmul_(slope, k)
            d_q[here] = d_rows.mul_(ctx.scale)
        d_q = d_q.view_as(q_BHTK).to(q_BHTK.dtype)
        return d_q, None, None, None, *(d.to(x.dtype) for d, x in zip([*d_k, *d_v], kept, strict=True))


class _Tensors:
    """Queries, scaled, and all steps' keys and values, in the precision that is computed in."""

    def __init__(self, q_BHTK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float):
        wide = torch.promote_types(q_BHTK.dtype, torch.float32)
        self.k, self.v = ([x.to(wide) for x in xs] for xs in (keys, values))
        self.groups = keys[0].shape[1]
        self.q = q_BHTK.to(wide).mul(scale).unflatten(1, (self.groups, -1))

    def scores(self, a: int, b: int, start: int) -> tuple[Tensor, Tensor]:
        """Of rows a..b-1: with the first step's rows start..b-1, [B, G, h, R, b - start], those after a row at -inf;
        and with each later step's own row, [B, G, h, R, steps - 1].
        """
        q = self.q[:, :, :, a:b]
        causal = _product(q, self.k[0][:, :, start:b].mT)
        after = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1)
        causal[..., a - start :].masked_fill_(after, -torch.inf)
        own = torch.stack([(q * k[:, :, None, a:b]).sum(-1) for k in self.k[1:]], -1)
        return causal, own


def _blocks(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """(first row, row after the last, first row of the document) of every block."""
    for start, end in ranges:
        for a in range(start, end, ROWS):
            yield a, min(a + ROWS, end), start


def _product(x_BGhRX: Tensor, y_BGXY: Tensor) -> Tensor:
    """Every head of a group times the group's matrix: [B, G, h, R, Y]."""
    with torch.autocast(x_BGhRX.device.type, enabled=False):
        return (x_BGhRX.flatten(2, 3) @ y_BGXY).unflatten(2, x_BGhRX.shape[2:4])


def _transposed(x_BGhRX: Tensor, y_BGhRY: Tensor) -> Tensor:
    """Sum over a group's heads and rows: [B, G, X, Y]."""
    with torch.autocast(x_BGhRX.device.type, enabled=False):
        return x_BGhRX.flatten(2, 3).mT @ y_BGhRY.flatten(2, 3)
