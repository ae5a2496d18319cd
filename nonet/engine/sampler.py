"""From logits to tokens: penalties and biases, temperature, top-k, top-p, min-p, one counter-based uniform per draw.

Sampling inverts the cumulative distribution at the row's uniform, so a token is a pure function of the row's logits
and (seed, stream, position). Masses and sums of a block of them are float32, as log-probs are, further sums float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.ops.rng import uniforms
from nonet.types import Sampling, UserError

BLOCK = 64  # tokens whose masses are added up first: where a draw falls is looked for among blocks, then inside one


@dataclass(frozen=True)
class Edit:
    """What penalties look at: the tokens of the prompt and those written since (a list that may still grow)."""

    sampling: Sampling
    prompt: Sequence[int]
    written: Sequence[int]

    @staticmethod
    def wanted(p: Sampling) -> bool:
        penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        return bool(penalised or p.logit_bias)

    def apply(self, logits_W: Tensor) -> Tensor:
        """Repetition penalty on prompt and completion, presence and frequency penalty on the completion, biases."""
        p, out_W = self.sampling, logits_W.clone()
        if p.repetition_penalty != 1:
            seen = torch.tensor([*self.prompt, *self.written], device=out_W.device).unique()
            old = out_W[seen]
            out_W[seen] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        if self.written and (p.presence_penalty or p.frequency_penalty):
            said, counts = torch.tensor(self.written, device=out_W.device).unique(return_counts=True)
            out_W[said] -= p.presence_penalty + p.frequency_penalty * counts.to(out_W.dtype)
        for token, bias in p.logit_bias:
            out_W[token] += bias
        return out_W


@dataclass
class SamplingRows:
    """Per-row sampling parameters, parallel arrays. positions: index of the token about to be drawn.

    draws: the uniforms of (keys, positions) where they were computed ahead; None: they are computed here.
    edits: row -> what was said before, for the rows whose logits are penalised or biased.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    keys: np.ndarray
    positions: np.ndarray
    min_p: np.ndarray | None = None
    draws: np.ndarray | None = None
    edits: dict[int, Edit] = field(default_factory=dict)

    @cached_property
    def plain(self) -> bool:
        """True when every row samples from the model's own distribution, or takes its argmax."""
        own = (self.temperature == 1) & (self.top_k == 0) & (self.top_p == 1) & (self.least == 0)
        return bool((own | (self.temperature == 0)).all())

    @cached_property
    def least(self) -> np.ndarray:
        """min_p of each row."""
        return np.zeros(len(self.top_k)) if self.min_p is None else self.min_p

    @cached_property
    def greedy(self) -> np.ndarray | None:
        """Which rows are greedy; None when none is."""
        found = self.temperature == 0
        return found if found.any() else None


class Distributions(NamedTuple):
    """Log-probs of N rows: the model's own, those of the edited logits (greedy rows take their argmax), and those that
    tokens are drawn from. They are the same tensor where nothing was asked for.
    """

    raw_NW: Tensor
    said_NW: Tensor
    shaped_NW: Tensor

    @staticmethod
    def of(logits_NW: Tensor, rows: SamplingRows) -> Distributions:
        raw_NW = logits_NW.float().log_softmax(-1)
        said_NW = _edited(logits_NW, raw_NW, rows.edits)
        return Distributions(raw_NW, said_NW, shape(said_NW, rows))

    def of_tokens(self, token_N1: Tensor, greedy_N: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Log-probs of chosen tokens after and before the transform, [N] each. A greedy row is a point mass: 0."""
        before_N1 = self.raw_NW.gather(1, token_N1)
        after_N1 = before_N1 if self.shaped_NW is self.raw_NW else self.shaped_NW.gather(1, token_N1)
        if greedy_N is not None:
            after_N1 = after_N1.masked_fill(torch.from_numpy(greedy_N).to(after_N1.device).unsqueeze(1), 0.0)
        return after_N1.squeeze(1), before_N1.squeeze(1)


def sample(logits_BW: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens_B, logprobs_B, raw_logprobs_B): log-probs under the transformed distribution and under the model's own.

    A greedy row (temperature 0) is a point mass: its behaviour log-prob is 0. UserError where logits are not finite.
    """
    found = Distributions.of(logits_BW, rows)
    draws = uniforms(rows.keys, rows.positions) if rows.draws is None else rows.draws
    token_B = draw(found.shaped_NW, found.said_NW, rows.greedy, draws)
    return token_B, *found.of_tokens(token_B.unsqueeze(1), rows.greedy)


def draw(
    shaped_BW: Tensor, said_BW: Tensor, greedy_B: np.ndarray | None, draws_B: np.ndarray, whose: str = "model"
) -> Tensor:
    """Tokens [B]: the argmax of `said` in greedy rows (of equals the lowest id), elsewhere where the cumulative mass of
    `shaped` reaches the row's uniform. UserError where they are not finite.
    """
    if greedy_B is not None and greedy_B.all():
        best_B = said_BW.max(-1)
        _check_finite(best_B.values, whose)
        return best_B.indices
    token_B = invert(shaped_BW.exp(), draws_B, whose)
    if greedy_B is None:
        return token_B
    return torch.where(torch.from_numpy(greedy_B).to(token_B.device), said_BW.argmax(-1), token_B)


def invert(mass_BW: Tensor, draws_B: np.ndarray, whose: str = "model") -> Tensor:
    """Token [B] at which the cumulative mass (of any total) exceeds its share draws_B of the total."""
    missing = -mass_BW.shape[1] % BLOCK
    blocks_BNK = (F.pad(mass_BW, (0, missing)) if missing else mass_BW).unflatten(1, (-1, BLOCK))
    ends_BN = blocks_BNK.sum(-1).double().cumsum(-1)
    _check_finite(ends_BN[:, -1:], whose)
    share_B1 = torch.from_numpy(draws_B).to(ends_BN.device).unsqueeze(1) * ends_BN[:, -1:]
    block_B1 = _first_above(ends_BN, share_B1)
    begin_B1 = F.pad(ends_BN, (1, 0)).gather(1, block_B1)
    inside_BK = blocks_BNK.gather(1, block_B1.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    return (block_B1 * BLOCK + _first_above(inside_BK + begin_B1, share_B1)).squeeze(1)


def _first_above(rising_BN: Tensor, share_B1: Tensor) -> Tensor:
    """Index [B, 1] of the first value above the share; where rounding has carried it past them all, of the one that
    reaches the last value. Steps of no height are never meant.
    """
    last_B1 = rising_BN[:, -1:]
    below_B1 = torch.minimum(share_B1, last_B1.nextafter(torch.full_like(last_B1, -torch.inf)))
    return torch.searchsorted(rising_BN, below_B1, right=True)


def _check_finite(x: Tensor, whose: str) -> None:
    if not x.isfinite().all():
        raise UserError(f"the {whose}'s logits are not finite: its weights are damaged or training has diverged")


def top(logits_W: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens of the model's own distribution with their log-probs, likeliest first."""
    found = logits_W.float().log_softmax(-1).topk(count)
    return tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def _edited(logits_BW: Tensor, raw_BW: Tensor, edits: dict[int, Edit]) -> Tensor:
    """Log-probs of the edited logits; the very tensor where nothing is edited."""
    if not edits:
        return raw_BW
    out_BW = raw_BW.clone()
    for b, edit in edits.items():
        out_BW[b] = edit.apply(logits_BW[b].float()).log_softmax(-1)
    return out_BW


def shape(raw_BW: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probs after temperature, then top-k, then top-p, then min-p, renormalised.

    A step touches only the rows that ask for it: what a row gets, to the last bit, is no business of its batch-mates.
    """
    if rows.plain:
        return raw_BW
    temperature = np.where(rows.temperature == 0, 1.0, rows.temperature)
    scaled_BW = (raw_BW / torch.from_numpy(temperature).to(raw_BW).unsqueeze(1)).log_softmax(-1)
    shaped_BW = _only(rows.temperature != 1, scaled_BW, raw_BW)
    if (rows.top_k > 0).any():
        shaped_BW = _only(rows.top_k > 0, _keep_top_k(shaped_BW, rows.top_k), shaped_BW)
    if (rows.top_p < 1).any():
        shaped_BW = _only(rows.top_p < 1, _keep_top_p(shaped_BW, rows.top_p), shaped_BW)
    if (rows.least > 0).any():
        shaped_BW = _only(rows.least > 0, _keep_likely(shaped_BW, rows.least), shaped_BW)
    return shaped_BW


def _only(asked_B: np.ndarray, new_BW: Tensor, old_BW: Tensor) -> Tensor:
    if asked_B.all():
        return new_BW
    return torch.where(torch.from_numpy(asked_B).to(old_BW.device).unsqueeze(1), new_BW, old_BW)


def _keep_top_k(logp_BW: Tensor, top_k: np.ndarray) -> Tensor:
    W = logp_BW.shape[1]
    k_B = torch.from_numpy(np.where(top_k == 0, W, np.minimum(top_k, W))).to(logp_BW.device)
    order = logp_BW.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(W, device=order.device).expand_as(order))
    return logp_BW.masked_fill(ranks >= k_B.unsqueeze(1), float("-inf")).log_softmax(-1)


def _keep_top_p(logp_BW: Tensor, top_p: np.ndarray) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p."""
    ordered, order = logp_BW.sort(dim=-1, descending=True, stable=True)
    mass = ordered.exp()
    before = mass.cumsum(-1) - mass
    drop = before >= torch.from_numpy(top_p).to(mass).unsqueeze(1)
    drop[:, 0] = False
    return logp_BW.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf")).log_softmax(-1)


def _keep_likely(logp_BW: Tensor, min_p: np.ndarray) -> Tensor:
    """Tokens at least min_p times as likely as the likeliest."""
    share_B1 = torch.from_numpy(min_p).to(logp_BW).unsqueeze(1).log()
    return logp_BW.masked_fill(logp_BW < logp_BW.amax(-1, keepdim=True) + share_B1, float("-inf")).log_softmax(-1)
