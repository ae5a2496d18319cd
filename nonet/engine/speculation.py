"""Speculative decoding: a drafter proposes, the target computes all of it at once, what it would have written stands.

A step of rows past their prompts, in three parts: `feed` (propose, then compute the last known token and the drafted
ones of each row), `verify` (verification.py), `confirm` (take over what stands). States are never rewound: the KDA
state after each token is written to a slot of its own, and the row goes on in the one after the last token that stands.
The features and entries that a draft keeps lie in the rows' pages and go with them: to followers, the prefix cache,
held and paused requests. Where memory is short, less is drafted; nobody is sent back for a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.engine.drafter import Choice, Drafter, Pairs, Proposal
from nonet.engine.feed import padded, sampling_of, sampling_through, state_of
from nonet.engine.forward import Forward
from nonet.engine.ledger import Ledger
from nonet.engine.row import Row
from nonet.engine.scheduler import Batch, Scheduler
from nonet.engine.verification import Verified, verify


@dataclass(frozen=True)
class Drafted:
    """Rows that were fed their last known token and K drafted ones. slots[b]: where the KDA state after each is, the
    last in the row's own slot; only that one in a model without KDA.
    """

    rows: list[Row]
    proposal: Proposal
    logits_BTW: Tensor
    slots: list[list[int]]

    def verify(self) -> Verified:
        return verify(self.logits_BTW, self.proposal, sampling_through(self.rows, self.proposal.tokens_BK.tolist()))


class Speculation:
    def __init__(self, drafter: Drafter, forward: Forward, ledger: Ledger, hybrid: bool, device: torch.device):
        self.drafter, self.forward, self.ledger = drafter, forward, ledger
        self.hybrid, self.device = hybrid, device

    # ------------------------------------------------------------------ a step

    def feed(self, batch: Batch) -> list[Drafted]:
        """Propose for rows past their prompts and compute what was proposed: rows with a proposal together where their
        pages have room for as much, those without apart.
        """
        out: list[Drafted] = []
        plain: list[Row] = []
        for room in sorted(set(batch.rooms)):
            rows = [row for row, has in zip(batch.rows, batch.rooms, strict=True) if has == room]
            proposal = self._propose(rows, room) if room else Proposal.of_nothing(len(rows), self.device)
            some = [b for b, n in enumerate(proposal.counts_B.tolist()) if n]
            plain += [row for b, row in enumerate(rows) if b not in set(some)]
            if some:
                drafted = [rows[b] for b in some]
                out.append(self._compute(drafted, proposal.of_rows(some, [row.left - 1 for row in drafted])))
        if plain:
            out.append(self._compute(plain, Proposal.of_nothing(len(plain), self.device)))
        return out

    def confirm(self, drafted: Drafted, written: Sequence[int], scheduler: Scheduler) -> None:
        """Row b wrote written[b] tokens: as many of those it was fed stand."""
        for row, slots, n in zip(drafted.rows, drafted.slots, written, strict=True):
            for slot in {*slots} - {slots[n - 1]}:
                self.ledger.slots.release(slot)
            scheduler.confirm(row, n, slots[n - 1])

    def _propose(self, rows: list[Row], most: int) -> Proposal:
        pairs = self._pairs(rows, [row.length for row in rows])
        proposal = self.drafter.propose(pairs, most, Choice(sampling_of(rows)))
        assert proposal.tokens_BK.shape[1] <= most, "a drafter proposed more than it was asked for"
        for row in rows:
            row.entered = row.length
        return proposal

    def _compute(self, rows: list[Row], proposal: Proposal) -> Drafted:
        last_B1 = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        tokens_BT = torch.cat([last_B1, proposal.tokens_BK], 1)
        T = tokens_BT.shape[1]
        slots = [self._slots(row, T) for row in rows]
        after_BT = torch.tensor(slots, device=self.device) if self.hybrid and T > 1 else None
        state = state_of(rows, self.ledger.memory, self.device)
        logits_BTW, features_BTF = self.forward.extend(tokens_BT, state, after_BT)
        self._observe(rows, [T] * len(rows), features_BTF)
        return Drafted(rows, proposal, logits_BTW, slots)

    def _slots(self, row: Row, count: int) -> list[int]:
        if not self.hybrid:
            return [row.slot] * count
        scratch = [self.ledger.slots.take() for _ in range(count - 1)]
        return [slot for slot in scratch if slot is not None] + [row.slot]

    # ----------------------------------------------------------------- prompts

    def learn(self, rows: Sequence[Row], counts: Sequence[int], features_BTF: Tensor | None) -> None:
        """The next counts[b] tokens of each row were computed, and are about to be counted as filled."""
        self._observe(rows, counts, features_BTF)
        self._enter(rows, [row.filled + n for row, n in zip(rows, counts, strict=True)])

    def settle(self, row: Row) -> None:
        """Every position that is filled has a true entry."""
        self._enter([row], [row.filled])

    def _observe(self, rows: Sequence[Row], counts: Sequence[int], features_BTF: Tensor | None) -> None:
        if features_BTF is None:
            return
        state, T = state_of(rows, self.ledger.memory, self.device), features_BTF.shape[1]
        steps_T = torch.arange(T, device=self.device)
        real_N = (steps_T < torch.tensor(counts, device=self.device)[:, None]).flatten().nonzero()[:, 0]
        pages_N, offsets_N = state.places(state.lengths_B[:, None] + steps_T, real_N)
        self.drafter.observe(features_BTF.flatten(0, 1)[real_N], pages_N, offsets_N, self.ledger.memory)

    def _enter(self, rows: Sequence[Row], until: Sequence[int]) -> None:
        """Enter the pairs before position until[b] that are not entered yet."""
        late = [row for row, n in zip(rows, until, strict=True) if n > row.entered]
        if late and self.drafter.taps:
            self.drafter.enter(self._pairs(late, [n for row, n in zip(rows, until, strict=True) if n > row.entered]))
        for row, n in zip(rows, until, strict=True):
            row.entered = max(row.entered, n)

    def _pairs(self, rows: Sequence[Row], until: Sequence[int]) -> Pairs:
        state = state_of(rows, self.ledger.memory, self.device)
        state.lengths_B = torch.tensor([row.entered for row in rows], device=self.device)
        fed = [row.tokens[row.entered : n] for row, n in zip(rows, until, strict=True)]
        counts_B = torch.tensor([len(f) for f in fed], device=self.device)
        return Pairs(state, padded(fed, self.device), counts_B, [row.tokens for row in rows])
