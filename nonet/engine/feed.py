"""From rows to tensors: what a batch is fed, where its rows stand in memory, how they sample.

A run of decode steps over the same rows is described once (`Decoding`) and then only advanced: at batch 32 describing
costs as much as the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nonet.engine.row import Row
from nonet.engine.sampler import Edit, SamplingRows
from nonet.model.state import PAGE, Memory, SequenceState
from nonet.ops.rng import uniforms

_AHEAD = 64  # draws computed at once per row: numpy needs hardly longer for 64 than for one
_SPARE = 8  # pages by which a decode batch's table is wider than it need be


def state_of(rows: Sequence[Row], memory: Memory, device: torch.device, width: int = 0) -> SequenceState:
    """The rows as a state; their tables have room for `width` pages or what the longest has. Unused entries name page
    0, which exists.
    """
    width = max(width, *(len(r.pages) for r in rows))
    table_BP = torch.tensor([r.pages + [0] * (width - len(r.pages)) for r in rows], device=device)
    slot_B, lengths_B = torch.tensor([[r.slot for r in rows], [r.filled for r in rows]], device=device)
    return SequenceState(memory, table_BP, slot_B, lengths_B)


def padded(fed: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Tokens [B, T], zeros on the right of the shorter ones."""
    longest = max(map(len, fed))
    return torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in fed], device=device)


def sampling_of(rows: Sequence[Row]) -> SamplingRows:
    """For the token after each row's known ones."""
    params = [r.request.sampling for r in rows]
    return SamplingRows(
        temperature=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params]),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        keys=np.array([r.key for r in rows], np.uint64),
        positions=np.array([r.length for r in rows], np.uint64),
        draws=draws(rows),
        edits={i: Edit(r.request.sampling, r.request.tokens, r.said) for i, r in enumerate(rows) if r.edited},
    )


def sampling_through(rows: Sequence[Row], drafted_BK: Sequence[Sequence[int]]) -> SamplingRows:
    """For the T = K+1 tokens after each row's known ones, [B * T] of them, if what was drafted is right."""
    T = len(drafted_BK[0]) + 1
    params = [r.request.sampling for r in rows]
    edits = {
        b * T + k: Edit(r.request.sampling, r.request.tokens, [*r.said, *drafted_BK[b][:k]])
        for b, r in enumerate(rows)
        if r.edited
        for k in range(T)
    }
    return SamplingRows(
        temperature=np.repeat([p.temperature for p in params], T),
        top_k=np.repeat([p.top_k for p in params], T),
        top_p=np.repeat([p.top_p for p in params], T),
        min_p=np.repeat([p.min_p for p in params], T),
        keys=np.repeat(np.array([r.key for r in rows], np.uint64), T, axis=0),
        positions=(np.array([r.length for r in rows], np.uint64)[:, None] + np.arange(T, dtype=np.uint64)).reshape(-1),
        edits=edits,
    )


def draws(rows: Sequence[Row]) -> np.ndarray:
    """The uniform of each row's next position: a pure function of its key and position, computed _AHEAD at once."""
    due = [r for r in rows if r.drawn != len(r.logprobs) // _AHEAD]
    if due:
        keys = np.repeat(np.array([r.key for r in due], np.uint64), _AHEAD, axis=0)
        first = [r.length - len(r.logprobs) % _AHEAD for r in due]
        positions = np.array(first, np.uint64)[:, None] + np.arange(_AHEAD, dtype=np.uint64)
        for row, ahead in zip(due, uniforms(keys, positions.reshape(-1)).reshape(-1, _AHEAD).tolist(), strict=True):
            row.draws, row.drawn = ahead, len(row.logprobs) // _AHEAD
    return np.array([r.draws[len(r.logprobs) % _AHEAD] for r in rows])


class Decoding:
    """Rows that decode together, one token each a step."""

    def __init__(self, rows: list[Row], preemptions: int, memory: Memory, device: torch.device):
        """preemptions: how often a row had been sent back until now; it may return elsewhere."""
        self.rows, self.preemptions = rows, preemptions
        self.state = state_of(rows, memory, device, width=max(len(r.pages) for r in rows) + _SPARE)
        self.last_B1 = torch.tensor([[r.tokens[-1]] for r in rows], device=device)
        self.sampling = sampling_of(rows)
        self._edited = [i for i, r in enumerate(rows) if r.edited]

    def covers(self, rows: list[Row], preemptions: int) -> bool:
        """Whether these are its rows, where they were, and their tables still have room."""
        same = self.rows == rows and self.preemptions == preemptions
        return same and max(len(r.pages) for r in rows) * PAGE <= self.state.capacity

    def turn_pages(self) -> None:
        """Enter the pages that rows have just taken."""
        for i, row in enumerate(self.rows):
            if row.filled % PAGE == 0:
                self.state.table_BP[i, row.filled // PAGE] = row.pages[row.filled // PAGE]

    def advance(self, tokens_B: Tensor) -> None:
        """`tokens_B` was written, and the rows' own records say so already."""
        self.last_B1 = tokens_B.unsqueeze(1)
        self.sampling.positions += 1
        self.sampling.draws = draws(self.rows)
        for i in self._edited:
            r = self.rows[i]
            self.sampling.edits[i] = Edit(r.request.sampling, r.request.tokens, r.said)
