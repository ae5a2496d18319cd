"""PackedBatch: the learner's food. Flat arrays over all tokens of all rows, no padding, one mask.

Invariants, checked when packing (invariants.py): the mask is True on policy tokens and on nothing else, every masked
token carries the log-prob it was sampled with, and the tokens are the trajectory's own (law 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nonet.rl.invariants import InvariantError, check_budget, check_row
from nonet.types import Trajectory


@dataclass(frozen=True)
class Scored:
    """A trajectory to train and what each of its policy tokens is worth, in order."""

    trajectory: Trajectory
    advantages: tuple[float, ...]

    @staticmethod
    def uniform(trajectory: Trajectory, advantage: float) -> Scored:
        """One advantage for every policy token."""
        return Scored(trajectory, (advantage,) * trajectory.policy_tokens)


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

    def trained_in(self, rows: Sequence[int]) -> int:
        """Trained tokens of some rows."""
        return sum(int(self.mask_T[self.starts[r] : self.starts[r + 1]].sum()) for r in rows)

    def length(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]

    def padded(self, rows: Sequence[int]) -> Padded:
        """Some rows as right-padded [B, T] tensors."""
        longest = max(self.length(r) for r in rows)
        tokens_BT = self.tokens_T.new_zeros(len(rows), longest)
        mask_BT = self.mask_T.new_zeros(len(rows), longest)
        index_BT = self.tokens_T.new_full((len(rows), longest), -1)
        for b, r in enumerate(rows):
            start, end = self.starts[r], self.starts[r + 1]
            tokens_BT[b, : end - start] = self.tokens_T[start:end]
            mask_BT[b, : end - start] = self.mask_T[start:end]
            index_BT[b, : end - start] = torch.arange(start, end)
        return Padded(tokens_BT, mask_BT, index_BT, list(rows))


@dataclass
class Padded:
    """index_BT: where each token is in the flat batch (-1: padding). rows: which row of the batch each is."""

    tokens_BT: Tensor
    mask_BT: Tensor
    index_BT: Tensor
    rows: list[int]

    @property
    def where_BT(self) -> Tensor:
        """[B, T-1]: True where the logits of a position predict a trained token."""
        return self.mask_BT[:, 1:]

    @property
    def index_N(self) -> Tensor:
        """Where the N trained tokens are in the flat batch, row by row."""
        return self.index_BT[:, 1:][self.where_BT]

    @property
    def row_N(self) -> Tensor:
        """Which of this part's rows each trained token is of."""
        return torch.arange(len(self.rows))[:, None].expand(self.where_BT.shape)[self.where_BT]


def pack(scored: Sequence[Scored], budget: int | None = None) -> PackedBatch:
    """Lay trajectories out flat. budget: policy tokens that none may exceed (rl.max_tokens)."""
    tokens: list[int] = []
    mask: list[bool] = []
    behaviour: list[float] = []
    advantage: list[float] = []
    version: list[int] = []
    starts = [0]
    for item in scored:
        values = iter(_worth(item, budget))
        for s in item.trajectory.segments:
            policy, n = s.author == "policy", len(s.tokens)
            tokens += s.tokens
            mask += [policy] * n
            behaviour += s.logprobs if policy else [0.0] * n
            advantage += islice(values, n) if policy else [0.0] * n
            version += [s.policy_version if policy else -1] * n
        starts.append(len(tokens))
    batch = PackedBatch(
        torch.tensor(tokens, dtype=torch.long),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(behaviour, dtype=torch.float32),
        torch.tensor(advantage, dtype=torch.float32),
        torch.tensor(version, dtype=torch.long),
        starts,
        [name(s.trajectory) for s in scored],
    )
    for row, item in enumerate(scored):
        check_row(batch, row, item.trajectory)
    return batch


def name(t: Trajectory) -> str:
    return f"{t.task_id} {t.id}"


def _worth(item: Scored, budget: int | None) -> tuple[float, ...]:
    t = item.trajectory
    if budget is not None:
        check_budget(t, budget)
    if len(item.advantages) != t.policy_tokens:
        raise InvariantError(f"{name(t)}: {len(item.advantages)} advantages for {t.policy_tokens} policy tokens")
    return item.advantages


def micro_batches(batch: PackedBatch, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows grouped by length so that each forward holds at most `tokens` padded tokens (or one row)."""
    out: list[list[int]] = []
    for r in sorted(rows, key=batch.length):
        if out and batch.length(r) * (len(out[-1]) + 1) <= tokens:
            out[-1].append(r)
        else:
            out.append([r])
    return out
