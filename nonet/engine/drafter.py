"""What proposes tokens for the engine to verify: the protocol, and the nouns it speaks in.

A draft remembers, by page, what `pools` names: the fused feature of every position its target has computed, and
entries of its own attention. The pair (fused feature of position p-1, token of position p) has its entry at position p;
position 0 has none and is masked out. An entry is *true* if its feature came from the target; entries of the draft's
own recycled states are entered again, from true features, before anything relies on them.

Order of calls in a step, where the first n positions of a row are in memory and its token of position n is known:

    propose   enters the true pairs up to position n, then drafts positions n+1 .. n+K (writing entries up to n+K-1)
    (target)  computes positions n .. n+K
    observe   keeps the fused features of positions n .. n+K; those behind what was accepted are garbage

`enter` comes after each chunk of a prompt, and before a row's pages are handed to the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nonet.engine.sampler import SamplingRows, draw, shape
from nonet.model.state import Memory, SequenceState
from nonet.ops.rng import uniforms

# Uniforms of one position of one stream, by purpose (ops/rng): what the target draws without a draft, what the draft
# draws, whether a drafted token is accepted, what is drawn in place of one that is not.
TARGET, DRAFT, COIN, RESIDUAL = range(4)


@dataclass(frozen=True)
class Pairs:
    """True pairs that have not been entered, of B rows.

    state      where the rows' pages lie (the draft's pools are state.memory.layers[-1]): lengths_B is the first
               position to be entered, at least 1; the table has room for every position that may be written; slot_B
               means nothing
    tokens_BT  tokens of positions lengths_B[b] + t; padded on the right with 0
    counts_B   how many of the T are real, at least 1. The feature that belongs to tokens_BT[b, t] is that of position
               lengths_B[b] + t - 1, which `observe` has kept
    known      every known token of each row, from position 0 on; read only
    """

    state: SequenceState
    tokens_BT: Tensor
    counts_B: Tensor
    known: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Choice:
    """How the tokens after the rows' known ones are drawn: rows.positions is that of the first."""

    rows: SamplingRows

    def pick(self, logits_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(index_B into V, q_BV) of the k-th drafted token, from 0, at the rows' temperature, top-k, top-p and min-p; a
        row at temperature 0 takes the argmax, and its q means nothing. Penalties and biases are the target's business.
        """
        logp_BV = logits_BV.float().log_softmax(-1)
        shaped_BV = shape(logp_BV, self.rows)
        draws_B = uniforms(self.rows.keys, self.rows.positions + np.uint64(k), DRAFT)
        return draw(shaped_BV, logp_BV, self.rows.greedy, draws_B, "draft"), shaped_BV.exp()


@dataclass(frozen=True)
class Proposal:
    """tokens_BK     ids of the target's vocabulary, K at most `most`
    counts_B      how many of the K are proposed for each row; the rest of tokens_BK means nothing, but is valid ids
    q_BKV         what each token was drawn from, over the draft's vocabulary, of any total (probabilities, not their
                  logarithms); None: one-hot drafts (an argmax, a copy)
    vocabulary_V  target id of each entry of the draft's vocabulary (d2t); None: V is the target's whole vocabulary
    """

    tokens_BK: Tensor
    counts_B: Tensor
    q_BKV: Tensor | None = None
    vocabulary_V: Tensor | None = None

    @staticmethod
    def of_nothing(rows: int, device: torch.device) -> Proposal:
        none = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return Proposal(none, none.sum(1))

    def of_rows(self, rows: Sequence[int], most_B: Sequence[int]) -> Proposal:
        """For some of the rows, most_B[b] tokens at most, and K as many as that leaves."""
        at = torch.tensor(rows, device=self.tokens_BK.device)
        counts_B = self.counts_B[at].minimum(torch.tensor(most_B, device=at.device))
        K = int(counts_B.max())
        q_BKV = None if self.q_BKV is None else self.q_BKV[at, :K]
        return Proposal(self.tokens_BK[at, :K], counts_B, q_BKV, self.vocabulary_V)

    def q_of_tokens(self) -> Tensor:
        """[B, K] float64; each row of q is normalised as it was when it was drawn from."""
        assert self.q_BKV is not None
        index_BK = self.tokens_BK
        if self.vocabulary_V is not None:
            index_W = index_BK.new_zeros(int(max(self.vocabulary_V.max(), index_BK.max())) + 1)
            index_W[self.vocabulary_V] = torch.arange(len(self.vocabulary_V), device=index_W.device)
            index_BK = index_W[index_BK]
        total_BK = self.q_BKV.sum(-1, dtype=torch.float64)
        return self.q_BKV.gather(2, index_BK.unsqueeze(2)).squeeze(2).double() / total_BK

    def q_at(self, k_B: Tensor, width: int) -> Tensor:
        """[B, W] float64: row b's q of its k_B[b]-th token over the target's vocabulary, 0 where the draft's has no
        such token.
        """
        assert self.q_BKV is not None
        q_BV = self.q_BKV[torch.arange(len(k_B), device=k_B.device), k_B].double()
        q_BV = q_BV / q_BV.sum(-1, keepdim=True)
        if self.vocabulary_V is None:
            return q_BV
        return q_BV.new_zeros(len(q_BV), width).index_copy_(1, self.vocabulary_V, q_BV)


class Drafter(Protocol):
    """taps    which hidden states of the target `observe` wants (model/taps.py); () if none: then neither `observe` nor
            `enter` is called
    steps   most tokens it proposes for a row
    pools   what it keeps per page: name -> shape after [P, ...], e.g. {"latent": (16, R), "feature": (16, D)}
    """

    taps: tuple[int, ...]
    steps: int
    pools: Mapping[str, tuple[int, ...]]

    def observe(self, features_NF: Tensor, pages_N: Tensor, offsets_N: Tensor, memory: Memory) -> None:
        """Fuse the target's features of N positions, F = len(taps) * D columns, and keep each in its page at its
        offset, in memory.layers[-1].
        """
        ...

    def enter(self, pairs: Pairs) -> None:
        """Write the entries of these pairs."""
        ...

    def propose(self, pairs: Pairs, most: int, choice: Choice) -> Proposal:
        """Enter these pairs (the last of each row is of its last known token), then draft up to `most` tokens, at
        least 1, for the positions after it. Pages for positions up to the last known one plus `most` are there.
        """
        ...

    def refresh(self) -> None:
        """The weights have changed (the target's: the pages are forgotten too), perhaps behind torch's back."""
        ...
