"""Cross-entropy over pieces of documents that share a forward but see nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.lm.batches import Piece
from nonet.model import Model
from nonet.model.span import Documents


@dataclass(frozen=True)
class Block:
    """tokens_BT: one piece a row (starts None), or all pieces end to end in one row, beginning at `starts`."""

    tokens_BT: Tensor
    starts: list[int] | None = None

    @staticmethod
    def of(tokens_N: np.ndarray, pieces: Sequence[Piece]) -> Block:
        """The pieces' tokens: side by side if they are equally long, packed otherwise."""
        parts = [torch.from_numpy(tokens_N[a:b].astype(np.int64)) for a, b in pieces]
        if len({len(p) for p in parts}) == 1:
            return Block(torch.stack(parts))
        ends = np.cumsum([len(p) for p in parts]).tolist()
        return Block(torch.cat(parts).unsqueeze(0), [0, *ends[:-1]])

    def predicted(self, ahead: int) -> Tensor:
        """[B, T - ahead]: True where the token `ahead` later belongs to the same document."""
        B, T = self.tokens_BT.shape
        if self.starts is None:
            return torch.ones(B, max(0, T - ahead), dtype=torch.bool)
        ranges = Documents(self.starts, T).ranges
        index_T = torch.arange(len(ranges)).repeat_interleave(torch.tensor([b - a for a, b in ranges]))
        return (index_T[ahead:] == index_T[: T - ahead]).unsqueeze(0)


def predictions(pieces: Sequence[Piece], ahead: int) -> int:
    """How many tokens of the pieces have a prediction from `ahead` tokens before."""
    return sum(max(0, b - a - ahead) for a, b in pieces)


def token_losses(model: Model, block: Block) -> tuple[Tensor, Tensor]:
    """(-log p of every predicted token [N], hidden_BTD), N in row-major order."""
    hidden_BTD = model(block.tokens_BT, starts=block.starts)
    where = block.predicted(1)
    logits_NW = model.logits(hidden_BTD[:, :-1][where])
    return F.cross_entropy(logits_NW.float(), block.tokens_BT[:, 1:][where], reduction="none"), hidden_BTD


def mtp_losses(model: Model, block: Block, hidden_BTD: Tensor) -> Tensor:
    """-log p under the MTP layer of every token that has two before it in its document."""
    where = block.predicted(2)
    logits_BTW = model.mtp_logits(block.tokens_BT, hidden_BTD, starts=block.starts)
    return F.cross_entropy(logits_BTW[:, :-1][where].float(), block.tokens_BT[:, 2:][where], reduction="none")
