"""The draft's loss, -log of the overlap of draft and target, and its relatives, without logits of all rows at once.

Of one position, with z logits and tau temperatures: p = softmax(z_p / tau_p) of the target over all V tokens,
q = softmax(z_q / tau_q) of the draft over its own Vd <= V tokens, token i of which is token d2t[i] of the target. Sums
run over the draft's tokens; p keeps its mass over all V, so what the draft cannot say counts as never accepted.

    acceptance  alpha = sum min(p, q), what rejection sampling accepts on average     mass m = sum p >= alpha
    overlap     -log alpha                                                            exp(-loss) == acceptance
    tv          1 - alpha, the total variation of p and q over all V tokens
    kl          m KL(p / m || q) = sum p (log p - log q) - m log m. KL(p || q) proper is infinite once p has mass
                outside the draft's vocabulary, whatever the draft does; this is the part the draft can change: never
                negative, 0 at the best draft, and KL itself at Vd = V
    hybrid      lambda kl + (1 - lambda) tv, lambda = exp(-eta alpha), no gradient through lambda (LK losses, Samarin et
                al., arXiv 2602.23881; eta 3 there). lambda is of the row's own alpha, as in speculators, so that no row
                depends on its batch-mates; ModelOpt takes one lambda of the mean alpha per draft depth

Means are sum w loss / sum w over the rows whose weight w is not 0, of every term alike; other rows are not computed.

Logarithms throughout: log min(p, q) = min(log p, log q), log alpha = logsumexp of that. Nothing is clamped, so the
value is right at any alpha that logits can express (gaps of 200: loss 200). Target logits of -inf on all the draft's
tokens leave alpha = 0: loss infinite, gradient 0.

Gradient. With S = {i: q_i < p_i} (a tie is not in S), q_S = sum over S of q, short = q_S / alpha in 0..1:

    tau_q d alpha / dz_i = q_i ([i in S] - q_S)             overlap: short q_i - [i in S] q_i / alpha
    tau_q d kl / dz_i    = m q_i - p_i                      tv:      q_S q_i - [i in S] q_i

Fall-back. Summed over tokens in absolute value, the overlap's gradient is exactly 2 short (1 - q_S) / tau_q. It
vanishes where the overlap lies on tokens of which the draft has enough (short -> 0), although m - alpha, the sum over S
of p - q, is missing elsewhere. That is softmax saturated, not an optimum: raising z_i moves q_i in proportion to q_i,
and the q_i of S have underflowed beside alpha. It can happen at any alpha below m; a uniform draft of 150,000 tokens
before a confident target is the usual case. KL's gradient has no such plateau: its size is at least
2 (m - alpha) / tau_q. So where the overlap's is smaller than `fallback` of that bound, KL's is added with weight
1 - short (1 - q_S) / (fallback (m - alpha)), which is 0 at the border and 1 on the plateau. The value stays -log alpha;
fallback 0 gives the pure gradient. Where m = alpha there is nothing to gain and nothing is added. The other losses have
no fall-back: tv is there to be compared with, and the hybrid's kl term is one.

Three forms: `overlap_definition` on logits; `overlap` on hidden states and heads, in blocks of rows whose size depends
on the vocabulary only (overlap_blocks.py), with the block in torch, in C on the CPU (native=False or NONET_NATIVE=0:
off) or in Triton on a GPU. The gradient is found in the forward pass, block by block, so that backward needs none of it
again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nonet.ops import overlap_native, overlap_triton
from nonet.ops.overlap_blocks import Blocks, Head, streamed
from nonet.ops.overlap_rules import Kind, Measures, Rule, fallback_share
from nonet.types import UserError


class DraftLoss(NamedTuple):
    """mean: over the weights, with gradient. rows_T, alpha_T: loss and acceptance, without; 0 where the weight is."""

    mean: Tensor
    rows_T: Tensor
    alpha_T: Tensor


def overlap(
    draft: Head,
    target: Head,
    d2t_W: Tensor | None = None,
    weights_T: Tensor | None = None,
    *,
    kind: Kind = "overlap",
    eta: float = 3.0,
    fallback: float = 0.1,
    native: bool = True,
) -> DraftLoss:
    """Loss of the draft's distributions against the target's, with first-order gradients for the draft's hidden states
    and head; the target gets none. hidden_TD of both heads have equal T, their D may differ.

    d2t_W: target id of each row of the draft's head (ids, not the offsets of an EAGLE-3 file), None if they are equal.
    weights_T: finite, not negative, or bool. Raises UserError.
    """
    rule = Rule(kind, eta, fallback).checked()
    rows = len(draft.checked("draft").hidden_TD)
    if len(target.checked("target").hidden_TD) != rows:
        raise UserError(f"overlap: {rows} rows of the draft against {len(target.hidden_TD)} of the target; need equal")
    _check_map(d2t_W, len(draft.weight_WD), len(target.weight_WD))
    share_T = _shares(weights_T, draft.hidden_TD, torch.promote_types(draft.hidden_TD.dtype, torch.float32))
    return DraftLoss(*streamed(_blocks(draft, target, native), draft, target, d2t_W, share_T, rule))


def overlap_definition(
    draft_TW: Tensor,
    target_TW: Tensor,
    d2t_W: Tensor | None = None,
    weights_T: Tensor | None = None,
    *,
    temperatures: tuple[float, float] = (1.0, 1.0),
    kind: Kind = "overlap",
    eta: float = 3.0,
    fallback: float = 0.1,
) -> DraftLoss:
    """`overlap` on logits, by autograd, at four and more times their memory. temperatures: draft's, target's."""
    rule = Rule(kind, eta, fallback).checked()
    _check_map(d2t_W, draft_TW.shape[-1], target_TW.shape[-1])
    share_T = _shares(weights_T, draft_TW, draft_TW.dtype)
    log_p = (target_TW.detach() / temperatures[1]).log_softmax(-1)
    log_p = log_p if d2t_W is None else log_p[:, d2t_W]
    log_q = (draft_TW / temperatures[0]).log_softmax(-1)

    S = log_q < log_p
    log_min = torch.where(S, log_q, log_p)
    dead = log_min.isneginf().all(-1)
    log_alpha = log_min.masked_fill(dead[:, None], 0).logsumexp(-1).masked_fill(dead, -torch.inf)
    alpha, p = log_alpha.exp(), log_p.exp()
    mass = p.sum(-1)
    divergence = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)
    kl = divergence - torch.xlogy(mass, mass)
    if rule.kind == "overlap":
        short = torch.where(S, (log_q - log_alpha[:, None]).exp(), 0).sum(-1)
        missing = torch.where(S, p - log_q.exp(), 0).sum(-1)
        measures = Measures(*(x.detach() for x in (log_alpha, short, missing, mass, divergence)))
        share = fallback_share(measures, rule.fallback)
        rows = -log_alpha + share * (kl - kl.detach())
    elif rule.kind == "hybrid":
        share = (-rule.eta * alpha.detach()).exp()
        rows = share * kl + (1 - share) * (1 - alpha)
    else:
        rows = kl if rule.kind == "kl" else 1 - alpha
    chosen = share_T > 0
    mean = (share_T[chosen] * rows[chosen]).sum()
    return DraftLoss(mean, rows.detach().where(chosen, 0), alpha.detach().where(chosen, 0))


def _blocks(draft: Head, target: Head, native: bool) -> type[Blocks]:
    """The fastest kind of block for these tensors."""
    if native and overlap_native.fits(draft.hidden_TD) and overlap_native.fits(target.hidden_TD):
        return overlap_native.NativeBlocks
    if native and overlap_native.fits_rows(draft, target):
        return overlap_native.RowBlocks
    if native and not overlap_triton.reason(draft.hidden_TD):
        return overlap_triton.TritonBlocks
    return Blocks


def _check_map(d2t_W: Tensor | None, own: int, whole: int) -> None:
    if d2t_W is None:
        if own != whole:
            raise UserError(f"d2t: missing, and the draft has {own} tokens where the target has {whole}; pass the map")
        return
    if d2t_W.shape != (own,) or d2t_W.is_floating_point():
        raise UserError(f"d2t: {d2t_W.dtype} of shape {tuple(d2t_W.shape)}; needs {own} integers, one a draft token")
    ids, counts = d2t_W.unique(return_counts=True)
    if int(ids[0]) < 0 or int(ids[-1]) >= whole:
        raise UserError(f"d2t: ids from {int(ids[0])} to {int(ids[-1])}; the target has 0 to {whole - 1}")
    if len(ids) < own:
        twice = int(ids[counts > 1][0])
        raise UserError(
            f"d2t: id {twice} stands for {int(counts.max())} draft tokens; needs ids, each once, not offsets"
        )


def _shares(weights_T: Tensor | None, rows_TX: Tensor, dtype: torch.dtype) -> Tensor:
    """weights / sum of weights, [T]."""
    T = len(rows_TX)
    if weights_T is None:
        weights_T = rows_TX.new_ones(T, dtype=dtype)
    if weights_T.shape != (T,):
        raise UserError(f"weights: shape {tuple(weights_T.shape)}; needs one number for each of {T} rows")
    weights_T = weights_T.detach().to(rows_TX.device, dtype)
    if not bool(((weights_T >= 0) & weights_T.isfinite()).all()):
        raise UserError("weights: some are negative or not finite; needs numbers from 0 (row left out) up")
    if not bool(weights_T.any()):
        raise UserError(
            f"weights: all {T} rows are masked, so there is nothing to learn; does the mask mark any answer?"
        )
    return weights_T / weights_T.sum()
