"""`ops.overlap` over hidden states and heads: a block of rows at a time, and what a block is made of, in torch.

A block holds the logits of a few rows: all of the draft's tokens, and those of the target's that the draft can say. The
target's logits are made a tile of the vocabulary at a time; from tokens the draft lacks only their logsumexp stays.
Rows per block follow from the vocabulary, so the memory taken depends on neither T nor D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nonet.ops.overlap_rules import Measures, Push, Rule, judge
from nonet.types import UserError

TILE = 4096  # tokens worked on together
AT_ONCE = 8  # tiles of intermediate results that live at a time
BYTES = {"cpu": 20 << 20, "cuda": 1 << 30}  # of a block's logits and its tiles


class Head(NamedTuple):
    """An output head and what it reads: logits_TW = hidden_TD @ weight_WD^T / temperature.

    lse_T: of a target whose weight_WD holds the draft's tokens only: the logsumexp of its logits over all its tokens,
    which `log_total` finds. None: weight_WD holds them all.
    """

    hidden_TD: Tensor
    weight_WD: Tensor
    temperature: float = 1.0
    lse_T: Tensor | None = None

    def checked(self, name: str) -> Head:
        """Itself; raises UserError."""
        h, w = self.hidden_TD, self.weight_WD
        if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1]:
            raise UserError(f"{name}: hidden {tuple(h.shape)} and head {tuple(w.shape)}; needs [T, D] and [tokens, D]")
        if not (h.dtype == w.dtype and h.is_floating_point() and h.device == w.device):
            raise UserError(f"{name}: hidden {h.dtype} on {h.device}, head {w.dtype} on {w.device}; needs them alike")
        if not 0 < self.temperature < math.inf:
            raise UserError(
                f"{name}: temperature {self.temperature}; must be positive and finite (greedy is near 0.01)"
            )
        if self.lse_T is not None and self.lse_T.shape != h.shape[:1]:
            raise UserError(
                f"{name}: lse of shape {tuple(self.lse_T.shape)}; needs one number for each of {len(h)} rows"
            )
        return self


def streamed(
    kind: type[Blocks], draft: Head, target: Head, d2t_W: Tensor | None, share_T: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean with gradient, rows_T, alpha_T). share_T: weights that add up to 1; rows of weight 0 are left out."""
    target = target._replace(hidden_TD=target.hidden_TD.detach(), weight_WD=target.weight_WD.detach())
    wants = tuple(torch.is_grad_enabled() and x.requires_grad for x in draft[:2])
    return _Streamed.apply(*draft[:3], kind, target, d2t_W, share_T, rule, wants)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def log_total(head: Head) -> Tensor:
    """logsumexp of each row's logits, [T], in float32 at least; a tile of the vocabulary at a time."""
    T = len(head.checked("head").hidden_TD)
    out = head.hidden_TD.new_full((T,), -math.inf, dtype=torch.promote_types(head.hidden_TD.dtype, torch.float32))
    for tokens in tiles(len(head.weight_WD)):
        out = torch.logaddexp(out, _logits(head, slice(0, T), tokens).logsumexp(-1))
    return out


class _Streamed(torch.autograd.Function):
    """Gradients are computed forward, scaled backward, and handed out once: a copy of the head's would be as large."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_WD: Tensor,
        temperature: float,
        kind: type[Blocks],
        target: Head,
        d2t_W: Tensor | None,
        share_T: Tensor,
        rule: Rule,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen = share_T.nonzero().squeeze(1)
        draft = Head(hidden_TD[chosen], weight_WD, temperature)
        lse_T = None if target.lse_T is None else target.lse_T[chosen].detach()
        target = target._replace(hidden_TD=target.hidden_TD[chosen], lse_T=lse_T)
        blocks = kind(draft, target, d2t_W, wants)
        rows_T, alpha_T = torch.zeros_like(share_T), torch.zeros_like(share_T)
        for a in range(0, len(chosen), blocks.rows):
            at = slice(a, min(a + blocks.rows, len(chosen)))
            measures = blocks.measure(at)
            rows, push = judge(measures, rule)
            if any(wants):
                blocks.descend(at, push.scaled(share_T[chosen[at]] / temperature))
            rows_T[chosen[at]], alpha_T[chosen[at]] = rows, measures.log_alpha.exp()
        ctx.gradients = _gradients(blocks, hidden_TD, weight_WD, chosen)
        ctx.mark_non_differentiable(rows_T, alpha_T)
        return (share_T[chosen] * rows_T[chosen]).sum(), rows_T, alpha_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("overlap: backward a second time; its gradients were handed out the first time")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(d_mean) for g in gradients), *(None,) * 7


def _gradients(
    blocks: Blocks, hidden_TD: Tensor, weight_WD: Tensor, chosen: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Of the inputs as they came: all rows, their own precision."""
    d_hidden, d_weight = blocks.d_hidden_TD, blocks.d_weight_WD
    if d_hidden is not None:
        d_hidden = torch.zeros_like(hidden_TD).index_copy_(0, chosen, d_hidden.to(hidden_TD.dtype))
    return d_hidden, None if d_weight is None else d_weight.to(weight_WD.dtype)


class Blocks:
    """Blocks of rows, in torch: `measure` a block, then `descend` on the same block. Sums in float32 at least.

    d_hidden_TD, d_weight_WD: filled by `descend`, None where not wanted.
    """

    rows: int
    d_hidden_TD: Tensor | None
    d_weight_WD: Tensor | None

    def __init__(self, draft: Head, target: Head, d2t_W: Tensor | None, wants: tuple[bool, bool]):
        self.draft, self.target = draft, target
        self.kept = Kept(d2t_W, len(target.weight_WD))
        h, w = draft.hidden_TD, draft.weight_WD
        self.wide = torch.promote_types(h.dtype, torch.float32)
        self.d_hidden_TD = torch.zeros_like(h, dtype=self.wide) if wants[0] else None
        self.d_weight_WD = torch.zeros_like(w, dtype=self.wide) if wants[1] else None
        self.allocate()

    def allocate(self) -> None:
        own = len(self.draft.weight_WD)
        row_bytes = self.wide.itemsize * (2 * own + AT_ONCE * min(TILE, len(self.target.weight_WD)))
        fit = BYTES.get(self.draft.hidden_TD.device.type, BYTES["cpu"]) // row_bytes
        self.rows = max(1, min(fit, len(self.draft.hidden_TD)))
        self.log_q = self.draft.hidden_TD.new_empty(self.rows, own, dtype=self.wide)
        self.log_p = torch.empty_like(self.log_q)

    def measure(self, at: slice) -> Measures:
        """Of rows `at`, leaving their log p and log q in the block."""
        log_p, log_q = self.log_p[: at.stop - at.start], self.log_q[: at.stop - at.start]
        lse_p = log_p.new_full((len(log_p),), -math.inf)
        lse_q = lse_p.clone()
        for tokens in tiles(len(self.target.weight_WD)):
            z = _logits(self.target, at, tokens)
            if self.target.lse_T is None:
                lse_p = torch.logaddexp(lse_p, z.logsumexp(-1))
            own, columns = self.kept.within(tokens)
            log_p[:, own] = z if columns is None else z[:, columns]
        for tokens in tiles(log_q.shape[1]):
            log_q[:, tokens] = z = _logits(self.draft, at, tokens)
            lse_q = torch.logaddexp(lse_q, z.logsumexp(-1))
        log_p -= (lse_p if self.target.lse_T is None else self.target.lse_T[at].to(self.wide))[:, None]
        log_q -= lse_q[:, None]
        return self.sums(log_p, log_q)

    def sums(self, log_p_RW: Tensor, log_q_RW: Tensor) -> Measures:
        """What `judge` wants to know of a block."""
        log_alpha = log_p_RW.new_full((len(log_p_RW),), -math.inf)
        log_short = log_alpha.clone()
        missing, mass, divergence = (torch.zeros_like(log_alpha) for _ in range(3))
        for tokens in tiles(log_p_RW.shape[1]):
            log_p, log_q = log_p_RW[:, tokens], log_q_RW[:, tokens]
            p, S = log_p.exp(), log_q < log_p
            log_alpha = torch.logaddexp(log_alpha, torch.minimum(log_p, log_q).logsumexp(-1))
            log_short = torch.logaddexp(log_short, torch.where(S, log_q, -math.inf).logsumexp(-1))
            missing += torch.where(S, p - log_q.exp(), 0).sum(-1)
            mass += p.sum(-1)
            divergence += (p * (log_p - log_q)).sum(-1)
        return Measures(log_alpha, (log_short - log_alpha).exp(), missing, mass, divergence)

    def descend(self, at: slice, push: Push) -> None:
        """Add the gradients of rows `at`, whose log p and log q are in the block."""
        own, log_short, target = (x[:, None] for x in push)
        h_RD, w = self.draft.hidden_TD[at], self.draft.weight_WD
        for tokens in tiles(len(w)):
            log_p, log_q = self.log_p[: len(h_RD), tokens], self.log_q[: len(h_RD), tokens]
            d = own * log_q.exp() - target * log_p.exp()
            d -= torch.where(log_q < log_p, (log_q + log_short).exp(), 0)
            if self.d_hidden_TD is not None:
                self.d_hidden_TD[at].addmm_(d, w[tokens].to(self.wide))
            if self.d_weight_WD is not None:
                self.d_weight_WD[tokens].addmm_(d.T, h_RD.to(self.wide))


def tiles(tokens: int) -> Iterator[slice]:
    return (slice(a, min(a + TILE, tokens)) for a in range(0, tokens, TILE))


def _logits(head: Head, at: slice, tokens: slice) -> Tensor:
    z = head.hidden_TD[at] @ head.weight_WD[tokens].T
    return z.to(torch.promote_types(z.dtype, torch.float32)).div_(head.temperature)


class Kept:
    """Which of the target's tokens the draft can say, for walks over the target's vocabulary."""

    def __init__(self, d2t_W: Tensor | None, whole: int):
        self.d2t_W, self.whole = d2t_W, whole
        self._ids, self._order = (None, None) if d2t_W is None else d2t_W.sort()

    def within(self, tokens: slice) -> tuple[Tensor | slice, Tensor | None]:
        """(draft ids of the target's `tokens`, where each is within them); the second is None if that is everywhere."""
        if self._ids is None or self._order is None:
            return tokens, None
        a, b = torch.searchsorted(self._ids, self._ids.new_tensor([tokens.start, tokens.stop])).tolist()
        return self._order[a:b], self._ids[a:b] - tokens.start

    @cache  # noqa: B019 (lives as long as one call of `overlap`)
    def t2d_V(self) -> Tensor | None:
        """Draft id of each of the target's tokens, -1 where there is none."""
        if self.d2t_W is None:
            return None
        t2d_V = self.d2t_W.new_full((self.whole,), -1, dtype=torch.int64)
        t2d_V[self.d2t_W] = torch.arange(len(self.d2t_W), device=self.d2t_W.device)
        return t2d_V
