"""What the context experiment measures on a trained model, always on the same held-out rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.bench.context_task import RecallText, in_batches, shuffled_windows
from nonet.model import Model

ROWS, TEXT_ROWS, TOKENS = 128, 32, 8192
MULTI = 4  # pairs of a multi-key row
SHUFFLES, KEPT = (2, 4, 8, 16, 48), 16


@torch.no_grad()
def probe(model: Model, task: RecallText, lengths: tuple[int, ...]) -> dict[str, Any]:
    """needle: one pair; multi_key: four; both the share of values recalled, by length. position_loss: nats a token of
    plain text by where in the row (up to the longest length). shuffle: what shuffling the text inside windows, all but
    the last 16 tokens, adds to the loss of those, in rows of the shortest length.
    """
    model.eval()
    out: dict[str, Any] = {"needle": {}, "multi_key": {}}
    for length in lengths:
        out["needle"][str(length)] = recalled(model, task, length, 1)
        out["multi_key"][str(length)] = recalled(model, task, length, MULTI)
    out["position_loss"] = position_losses(model, task.test_text(lengths[-1], TEXT_ROWS))
    out["shuffle"] = shuffle_losses(model, task.test_text(lengths[0], 2 * ROWS))
    return out


def recalled(model: Model, task: RecallText, length: int, pairs: int) -> float:
    rows = max(32, ROWS * 64 // length)
    tokens_BT, answers_BT = task.test_rows(length, pairs, rows)
    right = 0
    for tokens, answers in zip(in_batches(tokens_BT, TOKENS), in_batches(answers_BT, TOKENS), strict=True):
        hidden = model(torch.from_numpy(tokens))
        where = torch.from_numpy(answers[:, 1:])
        chosen = model.logits(hidden[:, :-1][where]).argmax(-1)
        right += int((chosen == torch.from_numpy(tokens[:, 1:])[where]).sum())
    return right / int(answers_BT.sum())


def position_losses(model: Model, tokens_BT: np.ndarray) -> dict[str, float]:
    """Mean loss in octaves of the position: "16" is of positions 16 to 31; "0" of 1 to 15."""
    loss_T = text_losses(model, tokens_BT).mean(0)
    edges = [1, *(1 << n for n in range(4, 30) if 1 << n < tokens_BT.shape[1]), tokens_BT.shape[1]]
    return {str(a if a > 1 else 0): float(loss_T[a - 1 : b - 1].mean()) for a, b in pairwise(edges)}


def shuffle_losses(model: Model, tokens_BT: np.ndarray) -> dict[str, float]:
    plain = text_losses(model, tokens_BT)[:, -KEPT:].mean()
    return {
        str(w): float(text_losses(model, shuffled_windows(tokens_BT, w, KEPT, 0))[:, -KEPT:].mean() - plain)
        for w in SHUFFLES
    }


def text_losses(model: Model, tokens_BT: np.ndarray) -> Tensor:
    """[B, T - 1]: -log p of every token but the first."""
    out: list[Tensor] = []
    for rows in in_batches(tokens_BT, TOKENS):
        tokens = torch.from_numpy(rows)
        logits = model.logits(model(tokens)[:, :-1])
        out.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(rows), -1))
    return torch.cat(out)
