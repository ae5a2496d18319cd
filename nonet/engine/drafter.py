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
from torch import Tensor

from nonet.engine.sampler import SamplingRows, draw, shape
from nonet.model.state import Memory, SequenceState

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
    """How drafts are drawn: the rows' sampling, and a uniform for each drafted position [B, K] (float64)."""

    rows: SamplingRows
    draws_BK: np.ndarray

    def pick(self, logits_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(index_B into V, q_BV) of the k-th drafted token, at the rows' temperature, top-k, top-p and min-p; a row at
        temperature 0 takes the argmax, and its q means nothing. Penalties and biases are the target's business.
        """
        logp_BV = logits_BV.float().log_softmax(-1)
        shaped_BV = shape(logp_BV, self.rows)
        return draw(shaped_BV, logp_BV, self.rows.greedy, self.draws_BK[:, k], "draft"), shaped_BV.exp()


@dataclass(frozen=True)
class Proposal:
    """tokens_BK     ids of the target's vocabulary, K at most `most`
    counts_B      how many of the K are proposed for each row; the rest of tokens_BK means nothing, but is valid ids
    q_BKV         what each token was drawn from, over the draft's vocabulary; None: one-hot drafts (an argmax, a copy)
    vocabulary_V  target id of each entry of the draft's vocabulary (d2t); None: V is the target's whole vocabulary
    """

    tokens_BK: Tensor
    counts_B: Tensor
    q_BKV: Tensor | None = None
    vocabulary_V: Tensor | None = None


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
