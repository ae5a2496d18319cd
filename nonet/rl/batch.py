"""PackedBatch: the learner's food. Flat arrays over all tokens of all rows, no padding, one mask.

Invariants, checked when packing: the mask is True on policy tokens and on nothing else, every masked token carries the
log-prob it was sampled with, and the tokens are the trajectory's own (law 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.rl.advantage import Scored


@dataclass
class PackedBatch:
    """tokens_T ids; mask_T trained tokens; behaviour_T log-prob at sampling; advantage_T; version_T (-1: not policy);
    starts: first index of each row, plus the total.
    """

    tokens_T: Tensor
    mask_T: Tensor
    behaviour_T: Tensor
    advantage_T: Tensor
    version_T: Tensor
    starts: list[int]
    names: list[str]

    @property
    def rows(self) -> int:
        return len(self.names)

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_T.sum())

    def length(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]

    def padded(self, rows: Sequence[int]) -> Padded:
        """Some rows as right-padded [B, T] tensors."""
        longest = max(self.length(r) for r in rows)

        def grid(x_T: Tensor) -> Tensor:
            out = x_T.new_zeros(len(rows), longest)
            for b, r in enumerate(rows):
                out[b, : self.length(r)] = x_T[self.starts[r] : self.starts[r + 1]]
            return out

        return Padded(
            *(grid(x) for x in (self.tokens_T, self.mask_T, self.behaviour_T, self.advantage_T, self.version_T))
        )


@dataclass
class Padded:
    tokens_BT: Tensor
    mask_BT: Tensor
    behaviour_BT: Tensor
    advantage_BT: Tensor
    version_BT: Tensor


def pack(scored: Sequence[Scored]) -> PackedBatch:
    """Lay trajectories out flat, each with one advantage for all its policy tokens."""
    tokens: list[int] = []
    mask: list[bool] = []
    behaviour: list[float] = []
    advantage: list[float] = []
    version: list[int] = []
    starts = [0]
    for trajectory, value in scored:
        for s in trajectory.segments:
            policy, n = s.author == "policy", len(s.tokens)
            tokens += s.tokens
            mask += [policy] * n
            behaviour += s.logprobs if policy else [0.0] * n
            advantage += [value if policy else 0.0] * n
            version += [s.policy_version if policy else -1] * n
        starts.append(len(tokens))
        if sum(mask[starts[-2] :]) != trajectory.policy_tokens:
            raise AssertionError(f"{trajectory.id}: mask covers other tokens than the policy's")
    return PackedBatch(
        torch.tensor(tokens),
        torch.tensor(mask),
        torch.tensor(behaviour, dtype=torch.float32),
        torch.tensor(advantage, dtype=torch.float32),
        torch.tensor(version),
        starts,
        [f"{t.task_id} {t.id}" for t, _ in scored],
    )


def micro_batches(batch: PackedBatch, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows grouped by length so that each forward holds at most `tokens` padded tokens (or one row)."""
    out: list[list[int]] = []
    for r in sorted(rows, key=batch.length):
        if out and batch.length(r) * (len(out[-1]) + 1) <= tokens:
            out[-1].append(r)
        else:
            out.append([r])
    return out
