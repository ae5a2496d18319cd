"""The four losses of `ops.overlap` as functions of five sums a row, with their gradients as three numbers a row.

Whoever walks the vocabulary (torch, C, Triton) only measures a row and then pushes its logits; what is being minimised
is decided here and nowhere else. `ops/overlap.py` has the derivations.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nonet.types import UserError

Kind = Literal["overlap", "tv", "kl", "hybrid"]
KINDS: tuple[Kind, ...] = ("overlap", "tv", "kl", "hybrid")


class Rule(NamedTuple):
    """What to minimise. eta: of the hybrid; fallback: of the overlap, as a share of the acceptance still missing."""

    kind: Kind = "overlap"
    eta: float = 3.0
    fallback: float = 0.1

    def checked(self) -> Rule:
        """Itself; raises UserError."""
        if self.kind not in KINDS:
            raise UserError(f"loss {self.kind!r}: not one of {', '.join(KINDS)}")
        for name in ("eta", "fallback"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{name} = {value}: must be 0 (off) or positive and finite")
        return self


class Measures(NamedTuple):
    """Of every row, [T], with S the tokens that the draft gives less than the target does (q < p).

    log_alpha    log of the acceptance, the sum of min(p, q)
    short        sum over S of q, as a share of alpha
    missing      sum over S of p - q: what the acceptance could still gain. Summed as such: mass - alpha would be noise
    mass         sum of p over the draft vocabulary: no draft with this vocabulary is accepted more often
    divergence   sum of p (log p - log q) over the draft vocabulary
    """

    log_alpha: Tensor
    short: Tensor
    missing: Tensor
    mass: Tensor
    divergence: Tensor


class Push(NamedTuple):
    """Of every row, [T]: d loss / d logit of token i = own q_i - [i in S] e^(log q_i + log_short) - target p_i."""

    own: Tensor
    log_short: Tensor
    target: Tensor

    def scaled(self, by: Tensor) -> Push:
        return Push(self.own * by, self.log_short + by.log(), self.target * by)


def judge(m: Measures, rule: Rule) -> tuple[Tensor, Push]:
    """(loss of every row, its push)."""
    alpha = m.log_alpha.exp()
    q_S = m.short * alpha
    none = torch.full_like(alpha, -math.inf)
    kl, kl_push = m.divergence - torch.xlogy(m.mass, m.mass), Push(m.mass, none, torch.ones_like(alpha))
    if rule.kind == "kl":
        return kl, kl_push
    if rule.kind == "tv":
        return 1 - alpha, Push(q_S, torch.zeros_like(alpha), torch.zeros_like(alpha))
    if rule.kind == "hybrid":
        share = torch.exp(-rule.eta * alpha)
        mixed = Push(share * m.mass + (1 - share) * q_S, torch.log1p(-share), share)
        return share * kl + (1 - share) * (1 - alpha), mixed
    share = fallback_share(m, rule.fallback)
    return -m.log_alpha, Push(m.short + share * m.mass, -m.log_alpha, share)


def fallback_share(m: Measures, fallback: float) -> Tensor:
    """How much of KL's gradient the overlap's is given, [T] in 0..1: 1 - short (1 - q_S) / (fallback missing), and 0
    where that is negative, the fallback is off, or nothing is missing.
    """
    bound = fallback * m.missing
    reached = m.short * (1 - m.short * m.log_alpha.exp()) / bound
    return torch.where(bound > 0, (1 - reached).clamp(min=0), 0)
