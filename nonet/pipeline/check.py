"""`nonet check`: a recipe resolved, what its model costs, and in words every setting that cannot take effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from nonet.model import Model, ModelConfig, hf
from nonet.pipeline.recipe import Recipe

_UNUSED = {
    "kda": ("kda_head_dim", "conv_kernel", "gate_lower_bound", "decay_rank"),
    "mla": ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "gqa": ("kv_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm", "rope"),
}


def print_check(recipe: Recipe) -> None:
    console = Console()
    console.print_json(json.dumps(recipe.model_dump(mode="json")))
    config = resolved_model(recipe)
    for line in costs(config):
        console.print(line, highlight=False)
    found = list(warnings(recipe, config))
    for warning in found:
        console.print(f"[yellow]no effect:[/yellow] {warning}", highlight=False)
    if not found:
        console.print("every setting can take effect")


def resolved_model(recipe: Recipe) -> ModelConfig:
    if recipe.start.model:
        return hf.read_config(Path(recipe.start.model))
    return recipe.model_config_for(recipe.start.vocab_size)


def costs(config: ModelConfig) -> Iterator[str]:
    """Parameters, floating-point operations and bytes, as sentences."""
    with torch.device("meta"):
        model = Model(config)
    mtp = sum(p.numel() for p in model.mtp.parameters()) if model.mtp else 0
    mixers = ", ".join(f"{config.layer_mixers.count(m)} {m}" for m in dict.fromkeys(config.layer_mixers))
    yield f"model: {model.parameter_count():,} parameters ({mtp:,} of them MTP), layers: {mixers}"
    yield f"forward: {model.flops_per_token():,} FLOPs a token, attention over the context aside"
    yield f"memory: {config.cache_bytes_per_token():,} bytes a token of context in fp32"
    yield f"        {config.state_bytes():,} bytes a sequence whatever its length"


def warnings(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Settings that are legal and do nothing."""
    rl, cold = recipe.rl, recipe.cold
    for mixer, keys in _UNUSED.items():
        for key in keys:
            if mixer not in config.layer_mixers and key in recipe.model:
                yield f"model.{key}: no layer is {mixer}"
    if recipe.start.model and recipe.model:
        yield f"[model]: the model is read from start.model = {recipe.start.model}"
    if cold and cold.mtp_weight > 0 and config.mtp_layers == 0:
        yield f"cold.mtp_weight = {cold.mtp_weight}: the model has no MTP layer (model.mtp_layers = 0)"
    if cold and cold.warmup >= cold.steps:
        yield f"cold.lr = {cold.lr} is never reached: cold.warmup = {cold.warmup} of {cold.steps} steps"
    if rl.warmup >= rl.steps:
        yield f"rl.lr = {rl.lr} is never reached: rl.warmup = {rl.warmup} of {rl.steps} steps"
    if rl.fraction == 1 and rl.minibatches == 1:
        yield f"rl.tau = {rl.tau}: with fraction = 1 and minibatches = 1 every ratio is 1, where its gradient is zero"
        yield f"rl.ratio_low, rl.ratio_high = {rl.ratio_low}, {rl.ratio_high}: for the same reason no ratio leaves them"
    if rl.fraction * rl.groups * rl.samples > rl.groups * rl.samples - 1 and rl.fraction < 1:
        yield f"rl.fraction = {rl.fraction}: of {rl.groups * rl.samples} trajectories it rounds up to all"
    if rl.max_tokens >= config.max_position:
        yield f"rl.max_tokens = {rl.max_tokens}: the model ends at {config.max_position} positions"
