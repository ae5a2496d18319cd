"""Drafts and feature batches small enough for tests."""

from __future__ import annotations

from typing import Any

import tiny
import torch

from nonet.draft.batch import FeatureBatch, observed
from nonet.draft.config import eagle3_config, mtp_config
from nonet.draft.model import Draft, started
from nonet.model import Model

# name -> (form, kind of target, its settings, the draft's)
FORMS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mtp": ("mtp", "hybrid", dict(mtp_layers=1), {}),
    "mtp of K3": ("mtp", "k3", dict(mtp_layers=1), {}),
    "mtp of Llama": ("mtp", "gqa", dict(mtp_layers=1), dict(taps=(0, 1, 2))),
    "mtp rotated": ("mtp", "hybrid", dict(mtp_layers=1, mla_rope=tiny.LLAMA3), {}),
    "eagle3": ("eagle3", "gqa", {}, dict(taps=(0, 1, 2))),
    "eagle3 grouped": ("eagle3", "gqa", {}, dict(taps=(1, 2), layer=dict(kv_heads=1, d_ff=20))),
}


def made(name: str, dtype: torch.dtype = torch.float32, d2t_W: torch.Tensor | None = None, **over: Any) -> Draft:
    """A draft in which no parameter is zero or one."""
    form, kind, shape, own = FORMS[name]
    target = tiny.model(kind, dtype=dtype, **shape)
    config = (mtp_config if form == "mtp" else eagle3_config)(target.config, **{**own, **over})
    draft = started(config, target, d2t_W)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn(p.shape, generator=noise, dtype=p.dtype) * 0.2)
    return draft


def batch_of(draft: Draft, ids: torch.Tensor, mask_BT: torch.Tensor | None = None, **more: Any) -> FeatureBatch:
    return read(draft.target, draft.config.taps, ids, mask_BT, **more)


def read(
    target: Model, taps: tuple[int, ...], ids: torch.Tensor, mask_BT: torch.Tensor | None = None, **more: Any
) -> FeatureBatch:
    """What the target thinks of these tokens; every token is an answer unless the mask says otherwise."""
    mask = torch.ones_like(ids, dtype=torch.bool) if mask_BT is None else mask_BT
    return observed(target, taps, ids, mask, **more)
