"""What draft training eats: tokens, what the frozen target thought at each, and which tokens count.

Position i holds token i and the target's hidden state after reading it, from which the target predicts token i + 1.
Step s of a draft (1, 2, ...) at row t reads the embedding of token t + s and predicts token t + s + 1, so both its
target distribution and its mask are those of position t + s and token t + s + 1: shifted left with its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nonet.model import Model
from nonet.model.span import Documents
from nonet.model.taps import Taps
from nonet.types import UserError


@dataclass(frozen=True)
class FeatureBatch:
    """tokens_BT     ids
    features_BTF  the target's taps, side by side in the order of the draft's config (model.taps)
    hidden_BTD    the target's hidden state before its final norm (tap L), of which its distributions are made
    mask_BT       True on tokens a draft should learn to predict: the answers
    counts_B      how many of a row's T tokens are real, padding after them; None: all
    starts        where documents packed into one row [1, T] begin; None: every row is one sequence
    lse_BT        logsumexp of the target's logits over its whole vocabulary (`ops.overlap_blocks.log_total`), at the
                  training's temperature, where it was kept with the features; None: a pruned draft's training
                  computes it again for every batch
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    hidden_BTD: Tensor
    mask_BT: Tensor
    counts_B: Tensor | None = None
    starts: Sequence[int] | None = None
    lse_BT: Tensor | None = None

    def checked(self, width: int, taps: int) -> FeatureBatch:
        """Itself; raises UserError if it does not fit a target of `width` under `taps` taps."""
        B, T = self.tokens_BT.shape
        for name, x, want in (
            ("features", self.features_BTF, (B, T, taps * width)),
            ("hidden", self.hidden_BTD, (B, T, width)),
            ("mask", self.mask_BT, (B, T)),
        ):
            if tuple(x.shape) != want:
                raise UserError(
                    f"{name}: shape {tuple(x.shape)}, needs {want}; were other taps or another target used?"
                )
        if self.starts is not None and (B != 1 or self.counts_B is not None):
            raise UserError(f"starts: documents are packed into one row without padding, this batch has {B} rows")
        return self

    def predicted(self, step: int) -> Tensor:
        """[B, T - step]: True where row t predicts, at this step, a masked-in token of its own document."""
        ahead = step + 1
        inside = torch.zeros_like(self.mask_BT[:, step:])
        inside[:, :-1] = self.mask_BT[:, ahead:] & (self._document_BT[:, ahead:] == self._document_BT[:, :-ahead])
        return inside

    @cached_property
    def _document_BT(self) -> Tensor:
        """Index of each token's document in its row; that of padding is its own."""
        T = self.tokens_BT.shape[1]
        index_BT = torch.zeros_like(self.tokens_BT)
        if self.starts is not None:
            Documents(self.starts, T)
            index_BT[0, list(self.starts)] = 1
            index_BT = index_BT.cumsum(1)
        elif self.counts_B is not None:
            index_BT[torch.arange(T, device=index_BT.device) >= self.counts_B[:, None]] = -1
        return index_BT

    @property
    def tokens(self) -> int:
        """How many are real."""
        return self.tokens_BT.numel() if self.counts_B is None else int(self.counts_B.sum())

    def to(self, dtype: torch.dtype) -> FeatureBatch:
        return replace(self, features_BTF=self.features_BTF.to(dtype), hidden_BTD=self.hidden_BTD.to(dtype))


@torch.no_grad()
def observed(
    target: Model,
    taps: Sequence[int],
    tokens_BT: Tensor,
    mask_BT: Tensor,
    counts_B: Tensor | None = None,
    starts: Sequence[int] | None = None,
) -> FeatureBatch:
    """Run the frozen target over these rows now (online features), instead of reading what it thought from a store."""
    found = Taps(taps)
    hidden_BTD = target(tokens_BT, counts_B=counts_B, starts=starts, taps=found)
    return FeatureBatch(tokens_BT, found.features_BTF, hidden_BTD, mask_BT, counts_B, starts)
