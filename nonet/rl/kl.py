"""Reverse KL to a teacher over the vocabulary, differentiated in the loss: the ablation of the sampled-token reward.

p the student's distribution after a token's past, q the teacher's after the same past, both at the sampling
temperature. These are losses and never advantages: a KL summed over tokens and used as one has expected gradient
E[KL grad log p] = KL * sum_v grad p_v = 0, since it is the same whichever token was drawn.

    kl_full    sum_v p_v (log p_v - log q_v)
    kl_topk    the same over the k tokens that the student finds likeliest, and for the rest of the vocabulary
               bucket       P' (log P' - log Q'), where P' and Q' are what both leave to it: a KL of k + 1 outcomes
               generalised  nothing, but each kept term is p_v (log p_v - log q_v) - p_v + q_v

Top k alone would reward moving mass off the support; renormalising over it would forget how much lies there, and with
k = 1 everything. Either form is at least 0, and 0 where p = q. The support is chosen without gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from nonet.config import Config
from nonet.rl.objective import Need, Per, Tokens

Tail = Literal["bucket", "generalised"]


class KLConfig(Config):
    top_k: int = Field(default=64, ge=1)  # tokens of the vocabulary that kl_topk keeps
    tail: Tail = "bucket"  # what becomes of the others


class TeacherLogits(Protocol):
    def of_row(self, row: int) -> Tensor:
        """[n, W] at the sampling temperature: what the teacher would say in place of each trained token of a row."""
        ...


class KL(ABC):
    """An Objective; blind to advantages and behaviour log-probs. Row by row, so that beside the student's logits of a
    micro-batch only one row's of the teacher exist.
    """

    needs: frozenset[Need] = frozenset({"logits"})
    per: ClassVar[Per] = "token"

    def __call__(self, tokens: Tokens) -> Tensor:
        assert tokens.logits_NW is not None
        teacher: TeacherLogits = tokens.teacher
        total = tokens.logits_NW.new_zeros(())
        counts = torch.bincount(tokens.row_N).tolist()
        for row, p_NW in enumerate(tokens.logits_NW.log_softmax(-1).split(counts)):
            if counts[row]:
                total = total + self.divergence(p_NW, teacher.of_row(row).log_softmax(-1)).sum()
        return total

    def clipped(self, tokens: Tokens) -> Tensor:
        """None: every token is trained as it is."""
        return torch.zeros_like(tokens.row_N, dtype=torch.bool)

    @abstractmethod
    def divergence(self, p_NW: Tensor, q_NW: Tensor) -> Tensor:
        """Log-probs of student and teacher -> KL_N."""


class FullKL(KL):
    def divergence(self, p_NW: Tensor, q_NW: Tensor) -> Tensor:
        return full_kl(p_NW, q_NW)


class TopKL(KL):
    def __init__(self, config: KLConfig):
        self.config = config

    def divergence(self, p_NW: Tensor, q_NW: Tensor) -> Tensor:
        return topk_kl(p_NW, q_NW, self.config.top_k, self.config.tail)


def full_kl(p_NW: Tensor, q_NW: Tensor) -> Tensor:
    return (p_NW.exp() * (p_NW - q_NW)).sum(-1)


def topk_kl(p_NW: Tensor, q_NW: Tensor, k: int, tail: Tail) -> Tensor:
    """With k at least the vocabulary there is no rest, and both forms are the full KL."""
    if k >= p_NW.shape[-1]:
        return full_kl(p_NW, q_NW)
    kept_NK = p_NW.detach().topk(k, dim=-1).indices
    p_NK, q_NK = p_NW.gather(-1, kept_NK), q_NW.gather(-1, kept_NK)
    terms_NK = p_NK.exp() * (p_NK - q_NK)
    if tail == "generalised":
        return (terms_NK - p_NK.exp() + q_NK.exp()).sum(-1)
    p_N, q_N = _rest(p_NW, kept_NK), _rest(q_NW, kept_NK)
    return terms_NK.sum(-1) + p_N.exp() * (p_N - q_N)


def _rest(logp_NW: Tensor, kept_NK: Tensor) -> Tensor:
    """log of the mass outside the support; not log(1 - mass inside), which loses all digits where little is outside."""
    return logp_NW.scatter(-1, kept_NK, float("-inf")).logsumexp(-1)


class Sight(NamedTuple):
    """What a teacher would say of one trajectory: features [n, D] and a head [W, D], whose product are logits."""

    features_ND: Tensor
    head_WD: Tensor

    def logits(self, temperature: float) -> Tensor:
        return (self.features_ND @ self.head_WD.T).float() / temperature

    def logprobs(self, tokens: Sequence[int], temperature: float) -> list[float]:
        """Of the n tokens that were written."""
        logp_NW = self.logits(temperature).log_softmax(-1)
        return logp_NW.gather(1, torch.tensor(tokens, device=logp_NW.device)[:, None])[:, 0].tolist()


class Sights:
    """A TeacherLogits over the rows of a part. Features are kept, logits are made when their turn comes."""

    def __init__(self, rows: list[Sight], temperature: float):
        self._rows, self._temperature = rows, temperature

    def of_row(self, row: int) -> Tensor:
        return self._rows[row].logits(self._temperature)
