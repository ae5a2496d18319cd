"""Prompt lookup: what was said after the same words before is proposed again. No model, no memory, no training.

The longest run of a row's last tokens that stands somewhere earlier in it is looked for, the latest such place first;
what follows there is proposed. Where that reaches the end of what is known, it goes on with itself: a row that repeats
itself with a period is proposed its period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nonet.engine.drafter import Choice, Pairs, Proposal
from nonet.model.state import Memory
from nonet.types import UserError


class PromptLookup:
    """A Drafter of one-hot drafts. shortest, longest: how many tokens must, and at most do, agree."""

    taps: tuple[int, ...] = ()
    pools: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, steps: int = 4, shortest: int = 2, longest: int = 8):
        if steps < 1:
            raise UserError(f"steps = {steps}: must be at least 1")
        if not 1 <= shortest <= longest:
            raise UserError(f"shortest = {shortest}, longest = {longest}: must be at least 1, and in this order")
        self.steps, self.shortest, self.longest = steps, shortest, longest

    def observe(self, features_NF: Tensor, pages_N: Tensor, offsets_N: Tensor, memory: Memory) -> None:
        """It reads tokens only."""

    def enter(self, pairs: Pairs) -> None:
        """It reads tokens only."""

    def refresh(self) -> None:
        """It has no weights."""

    def propose(self, pairs: Pairs, most: int, choice: Choice) -> Proposal:
        device = pairs.tokens_BT.device
        found = [self.after(known, most) for known in pairs.known]
        tokens_BK = torch.tensor([tokens or [0] * most for tokens in found], device=device)
        return Proposal(tokens_BK, torch.tensor([len(tokens) for tokens in found], device=device))

    def after(self, known: Sequence[int], count: int) -> list[int]:
        """`count` tokens to follow `known`; none where its end stands nowhere else in it."""
        tokens = np.array(known)
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        agreed = np.ones(len(ends), np.int64)
        for n in range(1, min(self.longest, len(tokens))):
            going = (agreed == n) & (ends >= n)
            agreed += going & (tokens[ends - n] == tokens[last - n])
        if not len(ends) or agreed.max() < self.shortest:
            return []
        start = int(ends[np.flatnonzero(agreed == agreed.max())[-1]]) + 1
        return [known[start + i % (len(known) - start)] for i in range(count)]
