"""The model against an independent definition of K3: a float64 forward that reads the same directory (k3_oracle)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_k3
import torch
from k3_oracle import Oracle

from nonet.model import SequenceState, hf

VARIANTS: dict[str, dict[str, Any]] = {
    "k3": {},
    "plain experts": {"packed": False},
    "dense": {"num_experts": 0},
    "ordinary residual": {"attn_res_block_size": 0},
    "float64 throughout": {"attn_res_block_size": 0, "num_experts": 0},
    "narrow bottleneck": {"rank": 5, "linear_attn_config__decay_rank": 5},
    "softplus decay": {"linear_attn_config__gate_lower_bound": None},
    "queries without a bottleneck, no gate": {"q_lora_rank": None, "mla_use_output_gate": False},
    "experts at full width": {"routed_expert_hidden_size": None, "latent_moe_use_norm": None},
    "no shared experts": {"num_shared_experts": 0},
    "weights as they are": {"moe_renormalize": False, "routed_scaling_factor": 1.0},
    "tied": {"tie_word_embeddings": True},
    "blocks of four, two dense layers": {"attn_res_block_size": 4, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_float64_forward(name: str, tmp_path: Path):
    source = tiny_k3.write(tmp_path, **VARIANTS[name])
    model, oracle = hf.load(source, torch.float64).eval(), Oracle(source)
    ids = torch.randint(0, tiny_k3.VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        ours = model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)
    want = oracle.log_probs(ids)
    # Routers and attention-residual sites compute in float32 whatever the model is.
    close = 1e-10 if name == "float64 throughout" else 3e-5
    assert float((ours - want).abs().max() / want.abs().max()) < close


def test_float32_forward_and_state(tmp_path: Path):
    source = tiny_k3.write(tmp_path)
    model, oracle = hf.load(source).eval(), Oracle(source)
    ids = torch.randint(0, tiny_k3.VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    want = oracle.log_probs(ids)
    with torch.no_grad():
        state = SequenceState.new(model.config, 1, 40, torch.float32)
        parts = [model(torch.tensor([ids[a:b]]), state) for a, b in ((0, 17), (17, 18), (18, 19), (19, 40))]
        ours = model.logits(torch.cat(parts, 1))[0].log_softmax(-1)
    assert float((ours - want).abs().max()) < 1e-4


def test_the_oracle_tells_models_apart(tmp_path: Path):
    """Each part of the architecture shows in the log-probs by far more than the tolerances above."""
    ids = list(range(2, 30))
    plain = Oracle(tiny_k3.write(tmp_path / "k3")).log_probs(ids)
    changes: dict[str, dict[str, Any]] = {
        "block": {"attn_res_block_size": 3},
        "situ": {"activation_situ_beta": 3.0},
        "bound": {"linear_attn_config__gate_lower_bound": -4.0},
        "top": {"num_experts_per_token": 2},
        "eps": {"rms_norm_eps": 1e-3},
    }
    for name, change in changes.items():
        other = Oracle(tiny_k3.write(tmp_path / name, **change)).log_probs(ids)
        assert float((other - plain).abs().max()) > 1e-3, name
