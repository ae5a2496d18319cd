"""Sequences that begin alike, read once: in one row, what each group of them shares, then what each has of its own.

    [ shared 0 | shared 1 | ... | own 0 of 0 | own 1 of 0 | ... | own 0 of 1 | ... ]

A group's own parts see what it shares and themselves, so every position computes what it would in its own sequence.
Samples of one prompt are such a group: with long prompts and short answers a forward is several times shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


class Tree:
    """G groups, S sequences, N positions. parent_S: the group of each sequence. split: where own parts begin."""

    def __init__(self, shared: Sequence[int], own: Sequence[Sequence[int]]):
        """Lengths: of each group's shared part, and of its sequences' own parts; all at least 1."""
        flat = [n for group in own for n in group]
        if len(shared) != len(own) or not flat or min(*shared, *flat) < 1:
            raise ValueError(f"shared = {list(shared)[:8]}, own = {flat[:8]}: needs groups of parts of 1 or more")
        self.split, self.total = sum(shared), sum(shared) + sum(flat)
        self.shared_starts = [0, *accumulate(shared)][:-1]
        self.own_starts = [0, *accumulate(flat)][:-1]  # from `split` on
        self.parent_S = torch.tensor([g for g, group in enumerate(own) for _ in group])
        self._shared_G, self._own_S = torch.tensor(shared), torch.tensor(flat)

    @cached_property
    def positions_N(self) -> Tensor:
        """Each token's index in its own sequence."""
        before_S = self._shared_G[self.parent_S]
        shared = [torch.arange(n) for n in self._shared_G.tolist()]
        own = [torch.arange(b, b + n) for b, n in zip(before_S.tolist(), self._own_S.tolist(), strict=True)]
        return torch.cat([*shared, *own])

    def attend(self, q_HNK: Tensor, k_GNK: Tensor, v_GNV: Tensor, scale: float) -> Tensor:
        """o_HNV, keys grouped. Two calls whatever the tree: all shared parts, then all own ones."""
        q_S, k_S, v_S = (self._padded(x, self._shared_at) for x in (q_HNK, k_GNK, v_GNV))
        q_O, k_O, v_O = (self._padded(x, self._own_at) for x in (q_HNK, k_GNK, v_GNV))
        grouped = q_HNK.shape[0] != k_GNK.shape[0]
        first = F.scaled_dot_product_attention(q_S, k_S, v_S, is_causal=True, scale=scale, enable_gqa=grouped)
        keys, values = (torch.cat([a[self.parent_S], b], 2) for a, b in ((k_S, k_O), (v_S, v_O)))
        then = F.scaled_dot_product_attention(
            q_O, keys, values, attn_mask=self._mask_S1RL, scale=scale, enable_gqa=grouped
        )
        real = [o.transpose(1, 2)[at >= 0] for o, at in ((first, self._shared_at), (then, self._own_at))]
        return torch.cat(real).transpose(0, 1)

    @staticmethod
    def _padded(x_HNK: Tensor, at_BT: Tensor) -> Tensor:
        """[B, H, T, K]: rows of x where `at` says; what is behind a part's end is some row of it, and is not seen."""
        return x_HNK[:, at_BT.clamp(min=0)].transpose(0, 1)

    @cached_property
    def _shared_at(self) -> Tensor:
        return _indices(self.shared_starts, self._shared_G)

    @cached_property
    def _own_at(self) -> Tensor:
        return _indices([self.split + start for start in self.own_starts], self._own_S)

    @cached_property
    def _mask_S1RL(self) -> Tensor:
        """True where a query of an own part may look: over its group's shared part, then over its own."""
        P, R = self._shared_at.shape[1], self._own_at.shape[1]
        shared_SP = torch.arange(P) < self._shared_G[self.parent_S, None]
        own_RR = torch.ones(R, R, dtype=torch.bool).tril()
        S = len(self.parent_S)
        return torch.cat([shared_SP[:, None].expand(S, R, P), own_RR.expand(S, R, R)], 2).unsqueeze(1)


def _indices(starts: Sequence[int], lengths_B: Tensor) -> Tensor:
    """[B, longest]; -1 behind the end."""
    steps_T = torch.arange(int(lengths_B.max()))
    return torch.where(steps_T < lengths_B[:, None], torch.tensor(starts)[:, None] + steps_T, -1)
