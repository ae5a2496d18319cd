"""Costs: K3's published sizes follow from its dimensions, and counts agree with models that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from nonet.model import ModelConfig, hf
from nonet.pipeline.recipe import load_recipe

K3 = Path(__file__).parents[2] / "recipes" / "k3.toml"


@pytest.fixture(scope="module")
def k3() -> ModelConfig:
    recipe = load_recipe([K3])
    return recipe.model_config_for(recipe.start.vocab_size)


def test_k3_has_its_published_size(k3):
    """2.78T total and 104.2B active (k3 section 0: 2.7795T and 104.19B by arithmetic, MTP aside)."""
    cost = hf.empty(k3).cost
    assert round(cost.total / 1e12, 4) == 2.7795
    assert round(cost.active / 1e9, 2) == 104.19


def test_k3_bytes(k3):
    """Derived sizes of k3 section 1.1: 27.6 kB a token, 434 MB + 46 MB of fp32 state, 1.42 to 1.56 TB of files."""
    cost = hf.empty(k3).cost
    assert cost.bytes_per_token(2) == 24 * 1152
    assert cost.bytes_per_state(4) == 69 * 4 * (96 * 128 * 128 + 3 * 3 * 12288)
    assert 1.42e12 < cost.weight_bytes < 1.56e12


@pytest.mark.parametrize("kind", ["hybrid", "gqa", "k3", "kimi_linear"])
def test_counts_are_those_of_a_model_that_exists(kind):
    m = tiny.model(kind, mtp_layers=1)
    cost = m.cost
    assert cost.total + cost.mtp == sum(p.numel() for p in m.parameters())
    assert cost == hf.empty(m.config).cost
    visited = 0
    for layer in m.layers:
        moe = m.config.moe
        for name, p in layer.named_parameters():
            routed = ".experts." in name and "shared" not in name
            visited += p.numel() * moe.top_k // moe.experts if routed else p.numel()
    ends = [m.norm, *([m.output_attn_res] if m.output_attn_res else [])]
    visited += m.lm_head.weight.numel() + sum(p.numel() for end in ends for p in end.parameters())
    assert cost.active == visited
    assert cost.flops_per_token == 2 * visited


def test_taps_are_the_first_middle_and_last_block():
    assert tiny.model("k3").config.taps == (1, 3, 5)
    assert ModelConfig(vocab_size=9, d_model=8, layers=8, d_ff=8, heads=1, attn_res_block=2).taps == (1, 3, 7)
    assert torch.tensor(ModelConfig(vocab_size=9, d_model=8, layers=32, d_ff=8, heads=1).taps).unique().numel() == 3
