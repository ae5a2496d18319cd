"""The training-speed bench: both sides are the same function of the same weights before they are timed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the bench's peer is transformers")

from nonet.bench import pretrain
from nonet.model import ModelConfig

SMALL = {**pretrain.KIMI, "d_model": 32, "layers": 4, "d_ff": 48, "vocab_size": 64, "heads": 2}


@pytest.mark.parametrize("moe", [None, pretrain.MOE.model_copy(update={"experts": 4, "top_k": 2, "d_ff": 32})])
def test_both_sides_compute_the_same_loss(monkeypatch, moe):
    monkeypatch.setattr(pretrain, "LENGTH", 24)
    config = ModelConfig(**SMALL, moe=moe)
    found = pretrain.compare(pretrain.Shape("x", config, config), 1, lambda r: None)
    assert found["loss_difference"] < 1e-4
    assert found["parameters"]["ours"] == found["parameters"]["theirs"]
    assert found["ratio"] > 0 and len(found["ratio_range"]) == 2


def test_steps_leave_no_gradient_behind():
    config = ModelConfig(**SMALL)
    ours, theirs = pretrain.pair(pretrain.Shape("x", config, config))
    tokens = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(0))
    for step, model in ((pretrain.our_step, ours), (pretrain.their_step, theirs)):
        step(model, tokens)
        assert all(p.grad is None for p in model.parameters())


def test_the_shapes_differ_only_where_they_say():
    dense, bounded, mixture = pretrain.SHAPES
    assert dense.ours == dense.theirs == bounded.theirs
    assert bounded.ours == dense.ours.model_copy(update={"decay": "bounded"})
    assert mixture.ours.moe is not None and mixture.ours.model_copy(update={"moe": None}) == dense.ours
