"""Drafters for tests of the engine: they know their target, err on purpose, and check what they are told."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor

from nonet.engine.drafter import Choice, Pairs, Proposal
from nonet.model import Model
from nonet.model.state import PAGE, Memory
from nonet.model.taps import Taps


class Echo:
    """Proposes the target's own argmax, or (sampled) draws from its own distribution blurred, wrong with a probability
    that is a pure function of the context, sometimes less than it may, sometimes nothing.

    Its pools remember features and, as entries, what they were made from. Every pair that a proposal relies on must
    have been entered with the right token and the feature before it, and (checked) features must be the target's of
    today. Recycled entries are marked, so that relying on one is noticed.
    """

    RECYCLED = -5.0

    def __init__(
        self,
        model: Model,
        steps: int = 3,
        wrong: float = 0.3,
        sampled: bool = False,
        vocabulary_V: Tensor | None = None,
        checked: bool = True,
    ):
        self.model, self.steps, self.wrong, self.sampled, self.checked = model, steps, wrong, sampled, checked
        self.vocabulary_V = vocabulary_V
        self.taps = (0, model.config.layers)
        width = 2 * model.config.d_model
        self.pools: Mapping[str, tuple[int, ...]] = {"entry": (PAGE, 2), "feature": (PAGE, width)}
        self.refreshed = self.proposals = 0

    def refresh(self) -> None:
        self.refreshed += 1

    def observe(self, features_NF: Tensor, pages_N: Tensor, offsets_N: Tensor, memory: Memory) -> None:
        memory.layers[-1]["feature"][pages_N, offsets_N] = features_NF

    def enter(self, pairs: Pairs) -> None:
        for b, count in enumerate(pairs.counts_B.tolist()):
            first = int(pairs.state.lengths_B[b])
            assert count >= 1 and first >= 1
            self._assert_true(pairs, b, first)
            at = torch.arange(first, first + count)
            tokens = pairs.tokens_BT[b, :count]
            assert tokens.tolist() == list(pairs.known[b][first : first + count])
            self._put(pairs, b, at, torch.stack([tokens.to(torch.float64), self._feature(pairs, b, at - 1)[:, 0]], 1))

    def propose(self, pairs: Pairs, most: int, choice: Choice) -> Proposal:
        self.proposals += 1
        self.enter(pairs)
        assert [len(k) for k in pairs.known] == (pairs.state.lengths_B + pairs.counts_B).tolist()
        if self.checked:
            self._assert_of_today(pairs)
        for b, known in enumerate(pairs.known):
            at = torch.arange(len(known), len(known) + most - 1)
            self._put(pairs, b, at, torch.full((most - 1, 2), self.RECYCLED))
        return self._drafted(pairs, most, choice)

    # ------------------------------------------------------------ what it says

    def _drafted(self, pairs: Pairs, most: int, choice: Choice) -> Proposal:
        chances = [random.Random(f"{len(k)}/{k[-1]}") for k in pairs.known]
        texts, qs = [list(k) for k in pairs.known], []
        for k in range(most):
            logits_BV = self._logits(texts)
            if self.sampled:
                index_B, q_BV = choice.pick(logits_BV * 0.7, k)
                qs.append(q_BV)
            else:
                noise = [self.wrong > chance.random() for chance in chances]
                index_B = (logits_BV.argmax(-1) + torch.tensor(noise).long()) % logits_BV.shape[1]
            tokens_B = index_B if self.vocabulary_V is None else self.vocabulary_V[index_B]
            for text, token in zip(texts, tokens_B.tolist(), strict=True):
                text.append(token)
        counts = [max(0, most - max(0, chance.randrange(6) - 2)) for chance in chances]
        tokens_BK = torch.tensor([t[len(k) :] for t, k in zip(texts, pairs.known, strict=True)])
        q_BKV = torch.stack(qs, 1) if qs else None
        return Proposal(tokens_BK, torch.tensor(counts), q_BKV, self.vocabulary_V)

    def _logits(self, texts: list[list[int]]) -> Tensor:
        longest = max(map(len, texts))
        tokens_BT = torch.tensor([t + [0] * (longest - len(t)) for t in texts])
        last_B = torch.tensor([len(t) - 1 for t in texts])
        hidden_BTD = self.model(tokens_BT, counts_B=last_B + 1)
        logits_BW = self.model.logits(hidden_BTD[torch.arange(len(texts)), last_B])
        return logits_BW if self.vocabulary_V is None else logits_BW[:, self.vocabulary_V]

    # ------------------------------------------------------- what it was told

    def _cells(self, pairs: Pairs, b: int, at: Tensor) -> tuple[Tensor, Tensor]:
        return pairs.state.table_BP[b, at // PAGE], at % PAGE

    def _feature(self, pairs: Pairs, b: int, at: Tensor) -> Tensor:
        return pairs.state.memory.layers[-1]["feature"][self._cells(pairs, b, at)].double()

    def _put(self, pairs: Pairs, b: int, at: Tensor, entries: Tensor) -> None:
        pool = pairs.state.memory.layers[-1]["entry"]
        pool[self._cells(pairs, b, at)] = entries.to(pool.dtype)

    def _assert_true(self, pairs: Pairs, b: int, end: int) -> None:
        """Entries of positions 1 .. end-1."""
        at = torch.arange(1, end)
        entries = pairs.state.memory.layers[-1]["entry"][self._cells(pairs, b, at)].double()
        assert entries[:, 0].tolist() == list(pairs.known[b][1:end]), "an entry of other tokens is relied on"
        assert torch.equal(entries[:, 1], self._feature(pairs, b, at - 1)[:, 0]), "an entry of another feature"

    def _assert_of_today(self, pairs: Pairs) -> None:
        for b, known in enumerate(pairs.known):
            taps = Taps(self.taps)
            self.model(torch.tensor([known[:-1]]), taps=taps)
            kept = self._feature(pairs, b, torch.arange(len(known) - 1))
            torch.testing.assert_close(kept, taps.features_BTF[0].double(), rtol=0, atol=1e-3)
