"""A draft's layer in pages, beside its target's: one entry for every pair, and the fused feature of every position.

The pair (feature of position p - 1, token of position p) has its entry at position p, so that an entry depends on
tokens up to its own and a shared page is right for every branch. Position 0 has no entry and is masked out. The
layer's own row of that pair is p - 1: its rotary angle, and the first row whose embedding an MTP layer leaves out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.draft.config import DraftConfig
from nonet.draft.model import Draft
from nonet.model.span import Span
from nonet.model.state import PAGE, Memory, SequenceState


def pools(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """What a draft keeps per page, for `Memory(attached=...)`: name -> shape after [P, ...]."""
    c = config.layer
    feature = {"feature": (PAGE, c.d_model)}
    if config.form == "mtp" and "mla" in c.layer_mixers:
        return {"latent": (PAGE, c.kv_lora_rank + c.qk_rope_head_dim), **feature}
    shape = (c.gqa_kv_heads, PAGE, c.gqa_head_dim)
    return {"k": shape, "v": shape, **feature}


def empty_state(draft: Draft, batch: int, capacity: int) -> SequenceState:
    """Of sequences with a memory of their own: position 0, which has no entry, is behind them."""
    dtype = draft.fc.weight.dtype
    state = SequenceState.new(draft.target.config, batch, capacity, dtype)
    pages, slots = state.memory.pages, state.memory.slots
    state.memory = Memory(draft.target.config, pages, slots, dtype, attached=pools(draft.config))
    state.lengths_B += 1
    return state


def span_of_pairs(draft: Draft, state: SequenceState, length: int, counts_B: Tensor | None = None) -> Span:
    """Of `length` pairs a row, whose entries go to positions lengths_B + t; counts_B of them are real, None: all."""
    steps_T = torch.arange(length, device=state.lengths_B.device)
    at_BT = state.lengths_B[:, None] + steps_T
    valid_BT = None if counts_B is None else steps_T < counts_B[:, None]
    real_N = None if valid_BT is None else valid_BT.flatten().nonzero()[:, 0]
    end = int((state.lengths_B + (length if counts_B is None else counts_B)).max())
    pages = -(-end // PAGE)
    read_L = torch.arange(pages * PAGE, device=at_BT.device)
    return Span(
        at_BT - 1,
        valid_BT,
        counts_B,
        real_N=real_N,
        places_N=state.places(at_BT, real_N),
        table_BP=state.table_BP[:, :pages],
        slots=state.slots,
        row_pages=state.table_BP.shape[1],
        mask_B1TL=((read_L >= 1) & (read_L <= at_BT[:, :, None])).unsqueeze(1),
        rotation=draft.rotation(at_BT - 1),
    )


def keep_features(draft: Draft, features_NF: Tensor, pages_N: Tensor, offsets_N: Tensor, memory: Memory) -> None:
    """Fuse the target's features of N positions and keep them where those positions lie."""
    pool_PSD = memory.layers[-1]["feature"]
    pool_PSD[pages_N, offsets_N] = draft.fuse(features_NF.to(draft.fc.weight.dtype)).to(pool_PSD.dtype)


def features_before(state: SequenceState, length: int) -> Tensor:
    """Kept features of positions lengths_B + t - 1, [B, T, D]: those of the next `length` pairs."""
    at_BT = state.lengths_B[:, None] - 1 + torch.arange(length, device=state.lengths_B.device)
    at_BT = at_BT.clamp(max=state.capacity - 1)  # of padding, which is not looked at
    page_BT = state.table_BP.gather(1, at_BT // PAGE)
    return state.layers[-1]["feature"][page_BT, at_BT % PAGE]


def enter(draft: Draft, tokens_BT: Tensor, fused_BTD: Tensor, state: SequenceState, counts_B: Tensor | None) -> Tensor:
    """Write the entries of pairs from position lengths_B on, which moves behind them; out_BTD before the final norm."""
    span = span_of_pairs(draft, state, tokens_BT.shape[1], counts_B)
    fused_BTD = fused_BTD.to(draft.fc.weight.dtype)
    out_BTD = draft.step(draft.embed(tokens_BT), fused_BTD, span, state.layers[-1])
    state.lengths_B += tokens_BT.shape[1] if counts_B is None else counts_B
    return out_BTD
