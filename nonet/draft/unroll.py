"""K steps of a draft over whole rows at once (training-time test; k3 section 3.5).

Step s, row t reads the embedding of token t + s (the true one) and, in place of the target's feature, its own output of
step s - 1; its position is s - 1 further on. What it attends to is what a chain that starts at row t has in its cache:
the true pairs of rows up to t, and its own recycled ones. Rows that run out of tokens fall away, so step s has T - s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nonet.draft.batch import FeatureBatch
from nonet.draft.cache import empty_state, enter
from nonet.draft.model import Draft
from nonet.model.span import Documents, Span, Unrolled


def unrolled(draft: Draft, batch: FeatureBatch, steps: int) -> Iterator[Tensor]:
    """out_BRD (before the final norm) of steps 1 to `steps`, R = T - s rows; fewer steps where T is short."""
    last = min(steps, batch.tokens_BT.shape[1] - 1)
    if last < 1:
        return
    state_BRD = draft.fuse(batch.features_BTF.to(draft.fc.weight.dtype))
    first = first_span(draft, batch)
    for step in range(1, last + 1):
        embed_BRD = draft.embed(batch.tokens_BT[:, step:])
        out_BRD = draft.step(embed_BRD, state_BRD[:, :-1], later_span(draft, first, batch, step))
        yield out_BRD
        state_BRD = draft.recycled(out_BRD)


def first_span(draft: Draft, batch: FeatureBatch) -> Span:
    """Where the pairs sit: as in `Model.mtp_logits`, which the first step of an untrained mtp draft equals."""
    T, counts = batch.tokens_BT.shape[1], batch.counts_B
    starts = None if batch.starts is None else Documents(batch.starts, T).shortened().starts
    span = draft.target.span(batch.tokens_BT[:, 1:], None, None if counts is None else counts - 1, starts)
    assert span.positions_BT is not None
    return replace(span, unrolled=Unrolled(span.documents), rotation=draft.rotation(span.positions_BT))


def later_span(draft: Draft, first: Span, batch: FeatureBatch, step: int) -> Span:
    """Of the rows that are left at this step; valid_BT tells routers which are real."""
    if step == 1:
        return first
    assert first.positions_BT is not None
    rows = batch.tokens_BT.shape[1] - step
    positions_BT = first.positions_BT[:, :rows] + step - 1
    valid = None
    if batch.counts_B is not None:
        valid = torch.arange(rows, device=batch.counts_B.device) < batch.counts_B[:, None] - step
    return replace(first, positions_BT=positions_BT, valid_BT=valid, rotation=draft.rotation(positions_BT))


def unrolled_definition(draft: Draft, batch: FeatureBatch, steps: int) -> list[Tensor]:
    """The same as generation does it, row by row: true pairs up to t entered into a cache, then recycled ones. Of rows
    without packing and padding; a document by itself is such a row.
    """
    T = batch.tokens_BT.shape[1]
    fused_BTD = draft.fuse(batch.features_BTF.to(draft.fc.weight.dtype))
    chains = [list(_chain(draft, batch.tokens_BT, fused_BTD, t, steps)) for t in range(T - 1)]
    return [torch.stack([c[s] for c in chains if len(c) > s], 1) for s in range(min(steps, T - 1))]


def _chain(draft: Draft, tokens_BT: Tensor, fused_BTD: Tensor, t: int, steps: int) -> Iterator[Tensor]:
    """out_BD of steps 1, 2, ... from row t, as far as there are tokens."""
    B, T = tokens_BT.shape
    state = empty_state(draft, B, T)
    out_BD = enter(draft, tokens_BT[:, 1 : t + 2], fused_BTD[:, : t + 1], state, None)[:, -1]
    yield out_BD
    for step in range(2, min(steps, T - 1 - t) + 1):
        recycled = draft.recycled(out_BD).unsqueeze(1)
        out_BD = enter(draft, tokens_BT[:, t + step : t + step + 1], recycled, state, None)[:, 0]
        yield out_BD
