"""Law 6: before training, the first step of an MTP draft is the target's MTP layer, to the last bit."""

from __future__ import annotations

import pytest
import tiny
import torch
from tiny_draft import read
from torch.nn import functional as F

from nonet.draft.config import mtp_config
from nonet.draft.model import Draft, started
from nonet.draft.unroll import unrolled
from nonet.quant import QuantConfig

KINDS = {
    "hybrid": ("hybrid", {}),
    "k3": ("k3", {}),
    "k3 in MX": ("k3", dict(moe=dict(experts=6, top_k=2, d_ff=32, latent=32), quant=QuantConfig())),
    "llama": ("gqa", {}),
    "untied": ("hybrid", dict(tie_embeddings=False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_step_one_is_the_mtp_layer(kind: str, dtype: torch.dtype):
    name, over = KINDS[kind]
    model, ids = tiny.model(name, mtp_layers=1, dtype=dtype, **over), tiny.tokens(3, 21)
    draft = started(mtp_config(model.config), model)
    batch = read(model, draft.config.taps, ids)
    with torch.no_grad():
        want = model.mtp_logits(ids, batch.hidden_BTD)
        assert torch.equal(draft.logits(next(unrolled(draft, batch, 3))), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_padding_and_with_packed_documents(dtype: torch.dtype):
    model = tiny.model("k3", mtp_layers=1, dtype=dtype)
    draft = started(mtp_config(model.config), model)
    for ids, more in (
        (tiny.tokens(3, 16), {"counts_B": torch.tensor([16, 9, 2])}),
        (tiny.tokens(1, 24), {"starts": [0, 7, 8, 23]}),
    ):
        batch = read(model, draft.config.taps, ids, **more)
        with torch.no_grad():
            want = model.mtp_logits(ids, batch.hidden_BTD, **more)
            assert torch.equal(draft.logits(next(unrolled(draft, batch, 2))), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pruned_vocabulary_has_the_same_logits_on_its_ids(dtype: torch.dtype):
    model, ids = tiny.model("hybrid", mtp_layers=1, dtype=dtype), tiny.tokens(2, 17)
    d2t = torch.tensor([3, 60, 0, 17, 18, 41])
    draft = started(mtp_config(model.config, draft_vocab=6), model, d2t)
    batch = read(model, draft.config.taps, ids)
    with torch.no_grad():
        out = next(unrolled(draft, batch, 1))
        normed = draft.final_norm(out)
        want = model.mtp_logits(ids, batch.hidden_BTD)
        assert torch.equal(F.linear(normed, model.lm_head.weight), want)  # what the head reads is the same to the bit
        # A product with fewer columns may be summed in another order by the library.
        close = 1e-14 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(draft.logits(out), want[..., d2t], atol=close, rtol=close)


def test_nothing_of_the_target_is_copied_into_training():
    model = tiny.model("k3", mtp_layers=1)
    draft: Draft = started(mtp_config(model.config), model)
    owned = {p.data_ptr() for p in draft.parameters()}
    assert not owned & {p.data_ptr() for p in model.parameters()}
    assert not any("embed" in name or "lm_head" in name for name, _ in draft.named_parameters())
