"""From scored trajectories to a PackedBatch, and its rows into micro-batches.

Invariants, checked when packing (invariants.py): the mask is True on policy tokens and on nothing else, every masked
token carries the log-prob it was sampled with, and the tokens are the trajectory's own (law 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from nonet.rl.batch import PackedBatch, Scored, name
from nonet.rl.invariants import InvariantError, check_budget, check_row


def pack(scored: Sequence[Scored], budget: int | None = None) -> PackedBatch:
    """Lay trajectories out flat. budget: policy tokens that none may exceed (rl.max_tokens)."""
    tokens: list[int] = []
    mask: list[bool] = []
    behaviour: list[float] = []
    advantage: list[float] = []
    version: list[int] = []
    starts = [0]
    for item in scored:
        values = iter(_worth(item, budget))
        for s in item.trajectory.segments:
            policy, n = s.author == "policy", len(s.tokens)
            tokens += s.tokens
            mask += [policy] * n
            behaviour += s.logprobs if policy else [0.0] * n
            advantage += islice(values, n) if policy else [0.0] * n
            version += [s.policy_version if policy else -1] * n
        starts.append(len(tokens))
    batch = PackedBatch(
        torch.tensor(tokens, dtype=torch.long),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(behaviour, dtype=torch.float32),
        torch.tensor(advantage, dtype=torch.float32),
        torch.tensor(version, dtype=torch.long),
        starts,
        [name(s.trajectory) for s in scored],
    )
    for row, item in enumerate(scored):
        check_row(batch, row, item.trajectory)
    return batch


def _worth(item: Scored, budget: int | None) -> tuple[float, ...]:
    t = item.trajectory
    if budget is not None:
        check_budget(t, budget)
    if len(item.advantages) != t.policy_tokens:
        raise InvariantError(f"{name(t)}: {len(item.advantages)} advantages for {t.policy_tokens} policy tokens")
    return item.advantages


def micro_batches(batch: PackedBatch, rows: Sequence[int], tokens: int, share: bool = True) -> list[list[int]]:
    """Rows, like lengths together, so that each forward holds at most `tokens` tokens, shared
    prompts once (or one row).
    """
    units: list[tuple[int, list[int]]] = []
    for prompt, members in batch.by_prompt(rows, share):
        room = 0
        for r in sorted(members, key=batch.length):
            own = batch.length(r) - len(prompt)
            if own > room:
                units.append((len(prompt), []))
                room = tokens - len(prompt)
            units[-1] = units[-1][0] + own, [*units[-1][1], r]
            room -= own
    out: list[tuple[int, list[int]]] = []
    for cost, members in sorted(units, key=lambda unit: batch.length(unit[1][-1])):
        if out and out[-1][0] + cost <= tokens:
            out[-1] = out[-1][0] + cost, [*out[-1][1], *members]
        else:
            out.append((cost, members))
    return [members for _, members in out]
