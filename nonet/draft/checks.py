"""Mistakes in draft training that cost hours when nobody says them at the start (drafts section 3.4)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from nonet.draft.batch import FeatureBatch
from nonet.draft.config import DraftConfig
from nonet.types import UserError

LOOKED_AT = 16  # steps whose batches are looked at before training


def check_batches(
    batches: Callable[[int], Sequence[FeatureBatch]], config: DraftConfig, unroll: int, steps: int
) -> None:
    """Look at the first batches; raises UserError, and warns of what is likely but not surely wrong."""
    looked = [batch for step in range(min(steps, LOOKED_AT)) for batch in batches(step)]
    if not looked:
        raise UserError("data: the first steps have no batch; is there a row that is not held out?")
    for batch in looked:
        check_fit(batch, config, unroll)
    told = torch.cat([batch.predicted(1).any(-1) for batch in looked])
    rows, idle = len(told), int((~told).sum())
    if idle == rows:
        raise UserError(f"mask: marks no token of {rows} rows; it must be True on the tokens that the target wrote")
    if 2 * idle > rows:
        warnings.warn(
            f"mask: {idle} of {rows} rows mark no token and teach nothing; were answers cut away by a short window?",
            stacklevel=2,
        )
    last = sum(int(batch.predicted(unroll).sum()) for batch in looked)
    first = sum(int(batch.predicted(1).sum()) for batch in looked)
    if 2 * last < first:
        warnings.warn(
            f"unroll = {unroll}: its last step has {last} predictions where the first has {first}; answers are hardly "
            "longer than that",
            stacklevel=2,
        )


def check_held_out(batches: Sequence[FeatureBatch], config: DraftConfig, unroll: int) -> None:
    for batch in batches:
        check_fit(batch, config, unroll)
    if not any(bool(batch.predicted(1).any()) for batch in batches):
        raise UserError("held-out rows: none that predicts anything, and drafts are chosen by them; hold some out")


def check_fit(batch: FeatureBatch, config: DraftConfig, unroll: int) -> None:
    batch.checked(config.layer.d_model, len(config.taps))
    T = batch.tokens_BT.shape[1]
    if unroll + 2 > T:
        raise UserError(f"unroll = {unroll}: needs rows of {unroll + 2} tokens at least, these have {T}; unroll less")
    if config.layer.max_position < T:
        raise UserError(f"rows of {T} tokens: the draft's layer has max_position {config.layer.max_position}; raise it")
    if not bool(batch.hidden_BTD.isfinite().all() and batch.features_BTF.isfinite().all()):
        raise UserError("features: some are not finite; a float16 or fp8 store may have overflowed, make it in bf16")
