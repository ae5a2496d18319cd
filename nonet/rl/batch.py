"""PackedBatch: the learner's food. Flat arrays over all tokens of all rows, no padding, one mask (packing.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.model.tree import Tree
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

    def prompt(self, row: int) -> tuple[int, ...]:
        """The tokens before the first trained one, but at least one: nothing predicts the first."""
        start, end = self.starts[row], self.starts[row + 1]
        trained = int(self.mask_T[start:end].int().argmax())
        return tuple(self.tokens_T[start : start + max(1, trained)].tolist())

    def part(self, rows: Sequence[int], share: bool = True) -> Part:
        """Some rows as one: prompts once each, then what follows them, up to the last token that is trained. share:
        rows with the same prompt have it together.
        """
        groups = list(self.by_prompt(rows, share))
        prompts = [len(prompt) for prompt, _ in groups]
        kept = [r for _, members in groups for r in members]
        begins = {r: self.starts[r] + n for n, (_, members) in zip(prompts, groups, strict=True) for r in members}
        trained = {r: self.mask_T[begins[r] : self.starts[r + 1]].nonzero()[:, 0] for r in kept}
        own = {r: max(1, int(trained[r][-1])) for r in kept}  # the last one is predicted, and predicts nothing
        tree = Tree(prompts, [[own[r] for r in members] for _, members in groups])
        ids = [torch.tensor(prompt) for prompt, _ in groups]
        ids += [self.tokens_T[begins[r] : begins[r] + own[r]] for r in kept]
        ends = torch.tensor(tree.shared_starts)[tree.parent_S] + torch.tensor(prompts)[tree.parent_S] - 1
        before = [
            torch.where(trained[r] > 0, tree.split + start + trained[r] - 1, end)
            for r, start, end in zip(kept, tree.own_starts, ends.tolist(), strict=True)
        ]
        counts = torch.tensor([len(trained[r]) for r in kept])
        index_N = torch.cat([begins[r] + trained[r] for r in kept])
        row_N = torch.arange(len(kept)).repeat_interleave(counts)
        return Part(torch.cat(ids).unsqueeze(0), tree, torch.cat(before), self.tokens_T[index_N], index_N, row_N, kept)

    def by_prompt(self, rows: Sequence[int], share: bool = True) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Rows sorted into those with the same prompt. share False: each by itself."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for r in rows:
            found.setdefault((self.prompt(r), None if share else r), []).append(r)
        for (prompt, _), members in found.items():
            yield prompt, members


@dataclass
class Part:
    """Rows of a batch as one row of L tokens (model/tree.py). Of its N trained tokens, row by row: from_N, which
    position predicts each; target_N, its id; index_N, where it is in the flat batch; row_N, which of `rows` it is of.
    rows: numbers in the batch, in this order.
    """

    tokens_1L: Tensor
    tree: Tree
    from_N: Tensor
    target_N: Tensor
    index_N: Tensor
    row_N: Tensor
    rows: list[int]


def name(t: Trajectory) -> str:
    return f"{t.task_id} {t.id}"
