"""Bits per byte on held-out documents: comparable between tokenizers, contexts and models.

Bits: -log2 p summed over predicted tokens. Bytes: of the same tokens. Documents are taken in the order of their hashes
up to a token budget and cut into pieces of the context; the first token of a piece has no prediction and counts
neither here nor there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nonet.lm.batches import Piece, micro_batches
from nonet.lm.corpus import Corpus
from nonet.lm.packed import Block, predictions, token_losses
from nonet.model import Model
from nonet.types import UserError


@dataclass(frozen=True)
class HeldOut:
    """bytes_W: how many bytes each token id stands for."""

    corpus: Corpus
    documents: np.ndarray
    bytes_W: torch.Tensor

    def pieces(self, context: int, budget: int) -> list[Piece]:
        """Held-out documents cut into `context` tokens, until `budget` tokens are covered."""
        out: list[Piece] = []
        starts, ends = self.corpus.starts_M, self.corpus.documents_M["end"]
        for d in self.documents:
            for a in range(int(starts[d]), int(ends[d]), context):
                b = min(a + context, int(ends[d]))
                if budget <= 0:
                    return out
                if b - a > 1:
                    out.append((a, b))
                    budget -= b - a
        return out

    def measure(self, model: Model, context: int, budget: int, micro_tokens: int = 4096) -> dict[str, float]:
        """{"bpb", "loss" (nats a token), "tokens", "bytes"}; leaves the model's mode as it was."""
        pieces = self.pieces(context, budget)
        if not pieces:
            raise UserError("data: no document is held out; raise data.heldout, or give more documents")
        return measure(model, self.corpus.tokens_N, pieces, self.bytes_W, micro_tokens)


@torch.no_grad()
def measure(
    model: Model, tokens_N: np.ndarray, pieces: Sequence[Piece], bytes_W: torch.Tensor, micro_tokens: int
) -> dict[str, float]:
    training, nats, size = model.training, 0.0, 0
    model.eval()
    for group in micro_batches(pieces, micro_tokens):
        block = Block.of(tokens_N, group)
        losses_N, _ = token_losses(model, block)
        nats += float(losses_N.double().sum())
        size += int(bytes_W[block.tokens_BT[:, 1:][block.predicted(1)]].sum())
    model.train(training)
    count = predictions(pieces, 1)
    return {"bpb": nats / math.log(2) / max(1, size), "loss": nats / count, "tokens": count, "bytes": size}
