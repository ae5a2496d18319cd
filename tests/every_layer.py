"""Models of every kind of layer, in sizes that fill no vector, for what runs in C."""

from __future__ import annotations

import copy

import torch
from torch import nn

from nonet.model import Model, ModelConfig, Rope, SequenceState
from nonet.model.init import initialise
from nonet.model.moe import Experts
from nonet.model.native_weights import Weights, rounded

GQA = {"activation": "silu", "mixers": ("gqa",) * 3, "layers": 3}
ODD_HYBRID = {
    **{"layers": 6, "kda_head_dim": 12, "q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 7},
    **{"qk_rope_head_dim": 3, "v_head_dim": 5, "conv_kernel": 3, "decay_rank": 6},
}
K3 = {"vocab_size": 91, "d_model": 64, "d_ff": 80, "heads": 2, "layers": 7, "attn_res_block": 2, "mtp_layers": 1}
MOE = {"experts": 9, "top_k": 2, "d_ff": 24, "shared": 2}
MODELS = {
    "llama": {**GQA, "vocab_size": 259, "d_model": 64, "d_ff": 96, "heads": 4, "kv_heads": 2, "rope": Rope()},
    "llama3": {
        **{**GQA, "vocab_size": 50, "d_model": 48, "d_ff": 33, "heads": 3, "tie_embeddings": False},
        "rope": Rope(scaling="llama3", factor=4, original_max_position=16),
    },
    "qwen": {
        **{**GQA, "vocab_size": 61, "d_model": 40, "d_ff": 50, "heads": 6, "kv_heads": 2, "head_dim": 20},
        **{"qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "rope": Rope()},
    },
    "nope": {**GQA, "vocab_size": 61, "d_model": 32, "d_ff": 40, "heads": 2},
    "hybrid": {"vocab_size": 391, "d_model": 64, "d_ff": 80, "heads": 2, "layers": 4, "mtp_layers": 1},
    "k3": {**K3, "moe": {**MOE, "latent": 32}},
    "k3, odd widths": {**K3, "d_model": 36, "attn_res_block": 3, "moe": {**MOE, "d_ff": 21, "latent": 19, "top_k": 3}},
    "k3, quantised": {**K3, "moe": {**MOE, "latent": 32, "d_ff": 64}, "quant": {"rule": "even"}},
    "kimi-linear": {
        **{**K3, "attn_res_block": 0, "decay": "softplus", "gate_rank": 12, "q_lora_rank": 0, "mla_gate": False},
        **{"activation": "silu", "moe": {**MOE, "shared": 0, "renormalise": False, "scale": 2.4}},
    },
    "odd": {**ODD_HYBRID, "vocab_size": 91, "d_model": 36, "d_ff": 50, "heads": 3},
}


def made(name: str) -> Model:
    """A model whose every parameter matters: norms not one, biases not zero."""
    model = initialise(Model(ModelConfig(**MODELS[name])), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim > 1:
                p.mul_(3)
            elif "norm" in key:
                p.uniform_(0.5, 1.5, generator=generator)
            elif (key.endswith("bias") and "dt" not in key) or key.endswith("A_log"):
                p.normal_(0, 0.3, generator=generator)
    return model


def states(model: Model, rows: int) -> tuple[SequenceState, SequenceState]:
    """Two equal states of `rows` ragged sequences."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, model.config.vocab_size, (rows, 12), generator=generator)
    counts = torch.randint(1, 13, (rows,), generator=generator)
    out = []
    for _ in range(2):
        state = SequenceState.new(model.config, rows, 40, torch.float32)
        model(tokens, state, counts)
        out.append(state)
    return out[0], out[1]


def twin(model: Model, weights: Weights) -> Model:
    """The model whose float32 weights are the numbers that copies in `weights` stand for."""
    rule = model.config.quant.rule if model.config.quant else "even"
    out = copy.deepcopy(model)
    out.lm_head.weight = nn.Parameter(out.lm_head.weight.detach().clone())
    for name, module in out.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("kv_b_proj"):
            module.weight.data = rounded(module.weight.data, weights, rule)
        if isinstance(module, Experts):
            kind = "mxfp4" if model.config.quant else weights
            for p in module.parameters():
                p.data = rounded(p.data, kind, rule)
    return out
