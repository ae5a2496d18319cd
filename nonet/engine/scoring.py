"""Log-probs that a model gives to tokens somebody else wrote: one forward over each passage, nothing remembered.

Passages are batched by length; logits exist for a few tokens at a time, never for a whole batch. `deterministic` feeds
every token alone, as the engine does in that mode: a token then scores, to the last bit, what it was sampled at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nonet.engine.forward import Forward
from nonet.model import Model, SequenceState
from nonet.types import UserError

BATCH_TOKENS = 4096  # padded tokens of one forward
_LOGITS = 1 << 23  # logits that exist at a time
_ALONE = 16  # tokens of a call in deterministic mode


class Passage(NamedTuple):
    """tokens, of which those from index `first` (at least 1) on are judged."""

    tokens: tuple[int, ...]
    first: int


def score(
    model: Model, passages: Sequence[Passage], temperature: float = 1.0, deterministic: bool = False
) -> list[list[float]]:
    """Log-probs of each passage's judged tokens, under softmax(logits / temperature). UserError for a passage that the
    model cannot read.
    """
    check(model, passages)
    read = _alone if deterministic else _batched
    out: list[list[float]] = [[] for _ in passages]

    def judge(i: int, at: int, logits_NW: Tensor) -> None:
        judged_N = torch.tensor(passages[i].tokens[at : at + len(logits_NW)], device=logits_NW.device)
        out[i] += tempered(logits_NW, temperature).gather(1, judged_N[:, None])[:, 0].tolist()

    read(model, passages, judge)
    return out


def likeliest(model: Model, passage: Passage, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most likely tokens, likeliest first, with their log-probs, in place of each judged token."""
    out: list[list[tuple[int, float]]] = []

    def keep(i: int, at: int, logits_NW: Tensor) -> None:
        found = tempered(logits_NW, 1.0).topk(min(count, logits_NW.shape[1]))
        for ids, values in zip(found.indices.tolist(), found.values.tolist(), strict=True):
            out.append(list(zip(ids, values, strict=True)))

    _batched(model, [passage], keep)
    return out


@torch.no_grad()  # and not inference_mode: losses are made of them
def features(model: Model, passages: Sequence[Passage]) -> list[Tensor]:
    """For each passage [n, D]: what `model.lm_head` turns into the logits of its judged tokens."""
    out = [torch.empty(0)] * len(passages)
    for i, hidden_ND in _hidden(model, passages):
        out[i] = model.norm(hidden_ND)
    return out


def tempered(logits_NW: Tensor, temperature: float) -> Tensor:
    """Log-probs, by the very steps that the sampler takes: before the temperature, then after it."""
    raw_NW = logits_NW.float().log_softmax(-1)
    return raw_NW if temperature == 1 else (raw_NW / temperature).log_softmax(-1)


def check(model: Model, passages: Sequence[Passage]) -> None:
    """UserError for more tokens than the model has positions, or one outside its vocabulary."""
    longest, size = model.config.max_position, model.config.vocab_size
    for tokens, _ in passages:
        if not 0 < len(tokens) <= longest:
            raise UserError(f"a passage of {len(tokens)} tokens: the model reads 1 to {longest}")
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise UserError(f"a passage with tokens {min(tokens)} to {max(tokens)}: the model's vocabulary has {size}")


# --------------------------------------------------------------------- reading

Judge = Callable[[int, int, Tensor], None]  # passage, index of the first judged token, logits [N, W] that predict it on


@torch.inference_mode()
def _batched(model: Model, passages: Sequence[Passage], judge: Judge) -> None:
    most = max(1, _LOGITS // model.config.vocab_size)
    for i, hidden_ND in _hidden(model, passages):
        for start in range(0, len(hidden_ND), most):
            judge(i, passages[i].first + start, model.logits(hidden_ND[start : start + most]))


@torch.inference_mode()
def _alone(model: Model, passages: Sequence[Passage], judge: Judge) -> None:
    forward, weight = Forward(model, None, deterministic=True), model.embed_tokens.weight
    for i, (tokens, first) in enumerate(passages):
        state = SequenceState.new(model.config, 1, len(tokens), weight.dtype, weight.device)
        read_1T = torch.tensor([tokens[:-1]], device=weight.device)
        for start in range(0, len(tokens) - 1, _ALONE):
            logits_TW = forward.extend(read_1T[:, start : start + _ALONE], state, None)[0][0]
            skipped = max(0, first - 1 - start)  # position t predicts token t + 1
            if skipped < len(logits_TW):
                judge(i, start + skipped + 1, logits_TW[skipped:])


def _hidden(model: Model, passages: Sequence[Passage]) -> Iterator[tuple[int, Tensor]]:
    """(passage, hidden [n, D] that predicts its judged tokens), shortest passages first."""
    device = model.embed_tokens.weight.device
    for batch in _batches(passages):
        rows = [torch.tensor(passages[i].tokens, device=device) for i in batch]
        hidden_BTD = model(pad_sequence(rows, batch_first=True))
        for b, i in enumerate(batch):
            tokens, first = passages[i]
            yield i, hidden_BTD[b, first - 1 : len(tokens) - 1]


def _batches(passages: Sequence[Passage]) -> Iterator[list[int]]:
    """Neighbours in length, at most BATCH_TOKENS padded tokens (or one passage); what judges nothing is left out."""
    batch: list[int] = []
    order = [i for i, p in enumerate(passages) if p.first < len(p.tokens)]
    for i in sorted(order, key=lambda i: len(passages[i].tokens)):
        if batch and len(passages[i].tokens) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
