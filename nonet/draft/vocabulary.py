"""Which of the target's tokens a draft can say: those the target says most, chosen once and kept with the draft.

A smaller head makes both training and drafting cheaper; what it leaves out is never drafted and still decoded by the
target. The map is part of the draft's weights (`Draft.d2t_W`): training that goes on from a draft goes on with its map.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.chat import Tokenizer
from nonet.draft.answers import Answer
from nonet.types import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """d2t_W: target ids, ascending; None where the draft keeps the whole vocabulary. coverage: share of what the target
    wrote that the draft can say.
    """

    d2t_W: Tensor | None
    coverage: float


def choose(answers: Iterable[Answer], size: int, vocab_size: int, always: Collection[int]) -> DraftVocabulary:
    """The `size` ids most often written by the target, then those most often read, then the lowest; `always` first of
    all. Raises UserError.
    """
    if not 0 < size <= vocab_size:
        raise UserError(f"draft_vocab = {size}: must be from 1 to the target's {vocab_size} tokens")
    if size < len(set(always)):
        raise UserError(f"draft_vocab = {size}: has no room for the {len(set(always))} control tokens; give more")
    written_V, read_V = counts(answers, vocab_size)
    total = int(written_V.sum())
    if not total:
        raise UserError("draft_vocab: the target wrote no token in these answers; answer some prompts first")
    if size == vocab_size:
        return DraftVocabulary(None, 1.0)
    first_V = torch.zeros(vocab_size, dtype=torch.int64)
    first_V[sorted(always)] = 1
    order = torch.arange(vocab_size)
    for key_V in (read_V, written_V, first_V):  # stable: the last key decides
        order = order[torch.argsort(key_V[order], descending=True, stable=True)]
    d2t_W = order[:size].sort().values
    return DraftVocabulary(d2t_W, int(written_V[d2t_W].sum()) / total)


def counts(answers: Iterable[Answer], vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often the target wrote, and was given, each token: two int64 [V]."""
    written_V, all_V = torch.zeros(2, vocab_size, dtype=torch.int64)
    for answer in answers:
        for row in answer.rows:
            tokens_T = torch.tensor(row.tokens)
            all_V += torch.bincount(tokens_T, minlength=vocab_size)
            for begin, end in row.policy:
                written_V += torch.bincount(tokens_T[begin:end], minlength=vocab_size)
    return written_V, all_V - written_V


def control_tokens(tokenizer: Tokenizer) -> set[int]:
    """Ids that are always in a draft's vocabulary."""
    return {*tokenizer.special.values(), *tokenizer.stop_ids}
