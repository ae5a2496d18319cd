"""`nonet check`: a recipe resolved, what its model costs, and in words every setting that cannot take effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from nonet.engine.bound import fast_bound
from nonet.lm.advice import TOKENS_PER_PARAMETER, advise
from nonet.lm.pretrain import stages, total_tokens
from nonet.model import ModelConfig, hf
from nonet.pipeline.recipe import Recipe
from nonet.types import UserError

MEASURABLE = 20_000_000  # parameters: more would take longer than anybody waits for a check
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
    refuse(config)
    console.print(fast_mode(config), highlight=False)
    if recipe.pretrain is not None:
        for line in plan(recipe, config):
            console.print(line, highlight=False)
    found = list(warnings(recipe, config))
    for warning in found:
        console.print(f"[yellow]no effect:[/yellow] {escape(warning)}", highlight=False)
    if not found:
        console.print("every setting can take effect")


def resolved_model(recipe: Recipe) -> ModelConfig:
    if recipe.start.model:
        return hf.read_config(Path(recipe.start.model))
    return recipe.model_config_for(recipe.start.vocab_size)


def costs(config: ModelConfig) -> Iterator[str]:
    """Parameters, floating-point operations and bytes, as sentences."""
    cost = hf.empty(config).cost
    mixers = ", ".join(f"{config.layer_mixers.count(m)} {m}" for m in dict.fromkeys(config.layer_mixers))
    mtp = f", and {short(cost.mtp)} in the MTP layer" if cost.mtp else ""
    yield f"model: {short(cost.total)} total, {short(cost.active)} active parameters{mtp}; layers: {mixers}"
    yield f"forward: {short(cost.flops_per_token)} FLOPs a token, attention over the context aside"
    yield f"weights: {short(cost.weight_bytes)} bytes in bfloat16, quantised experts packed"
    yield f"memory: {cost.bytes_per_token():,} bytes a token of context in fp32 ({cost.bytes_per_token(2):,} in bf16)"
    yield f"        {cost.bytes_per_state():,} bytes a sequence whatever its length"


def short(count: int) -> str:
    """Four digits and a letter.

    >>> short(2_779_500_000_000), short(104_190_000_000), short(1_234_567), short(512)
    ('2.78T', '104.2B', '1.235M', '512')
    """
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            digits = 2 if letter == "T" else 1 if letter == "B" else 3
            return f"{count / size:.{digits}f}{letter}"
    return f"{count:,}"


def fast_mode(config: ModelConfig) -> str:
    """What batching, C kernels and the prefix cache change in log-probs, measured where the model is small enough."""
    total = hf.empty(config).cost.total
    if total > MEASURABLE:
        return f"engine: fast mode not measured, {short(total)} parameters are more than {short(MEASURABLE)}"
    bound = fast_bound(config)
    tokens = "the same tokens" if bound.same else "not always the same tokens"
    return (
        f"engine: fast mode within {bound.worst:.1e} of the deterministic mode's log-probs, {tokens} "
        f"(random weights, {bound.tokens} tokens)"
    )


def refuse(config: ModelConfig) -> None:
    """Models that would train and then disappoint."""
    low, mid, high = config.taps
    if config.mtp_layers and len({low, mid, high}) < 3:
        raise UserError(
            f"model.layers = {config.layers} with model.attn_res_block = {config.attn_res_block}: a draft's low, mid "
            f"and high features would be the outputs of layers {low + 1}, {mid + 1} and {high + 1}, which coincide; "
            "use at least three blocks (or mtp_layers = 0)"
        )


def warnings(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Settings that are legal and do nothing."""
    yield from _model_warnings(recipe, config)
    yield from _rl_warnings(recipe, config) if recipe.pretrain is None else _pretrain_warnings(recipe, config)


def _model_warnings(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    for mixer, keys in _UNUSED.items():
        for key in keys:
            if mixer not in config.layer_mixers and key in recipe.model:
                yield f"model.{key}: no layer is {mixer}"
    if recipe.start.model and recipe.model:
        yield f"[model]: the model is read from start.model = {recipe.start.model}"


def _rl_warnings(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    rl, cold = recipe.rl, recipe.cold
    if cold and cold.mtp_weight > 0 and config.mtp_layers == 0:
        yield f"cold.mtp_weight = {cold.mtp_weight}: the model has no MTP layer (model.mtp_layers = 0)"
    if cold and cold.warmup >= cold.steps:
        yield f"cold.lr = {cold.lr} is never reached: cold.warmup = {cold.warmup} of {cold.steps} steps"
    if recipe.effort is not None and recipe.limits is None:
        yield f"[effort]: no level of tasks.efforts = {', '.join(recipe.tasks.efforts)} is limited"
    if recipe.distill.experts and recipe.experts is not None:
        yield "distill.experts: the student of [experts] is taught by the experts of the run"
    if rl.warmup >= rl.steps:
        yield f"rl.lr = {rl.lr} is never reached: rl.warmup = {rl.warmup} of {rl.steps} steps"
    if rl.fraction == 1 and rl.minibatches == 1:
        yield f"rl.objective = {rl.objective}: with fraction = minibatches = 1 every ratio is 1: nothing is clipped"
    if rl.fraction * rl.groups * rl.samples > rl.groups * rl.samples - 1 and rl.fraction < 1:
        yield f"rl.fraction = {rl.fraction}: of {rl.groups * rl.samples} trajectories it rounds up to all"
    if rl.max_tokens >= config.max_position:
        yield f"rl.max_tokens = {rl.max_tokens}: the model ends at {config.max_position} positions"


# -------------------------------------------------------------------------- pretraining


def plan(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """The stages, what they cost on this machine, and the size that would use a given time best."""
    assert recipe.pretrain is not None
    for s in stages(recipe.pretrain):
        documents = f"documents of at least {s.min_document} tokens" if s.min_document else "all documents, packed"
        yield f"stage {s.name}: {s.steps} steps of {s.rows} x {s.context} tokens, peak lr {s.lr:g}, {documents}"
    tokens, hours = total_tokens(recipe.pretrain), recipe.advice.hours
    a = advise(config, recipe.pretrain, hours, recipe.advice.probe_s)
    yield (
        f"speed: {a.mine.tokens_per_s:,.0f} tokens a second measured on this machine; {short(tokens)} tokens take "
        f"{span(a.seconds)} and are {tokens / a.mine.active:.1f} an active parameter"
    )
    c = a.advised
    yield (
        f"advice: this box, {span(hours * 3600)}: {short(a.active)} active parameters, {short(a.tokens)} tokens (rule: "
        f"about {TOKENS_PER_PARAMETER} tokens an active parameter is compute-optimal; "
        f"{a.measured.tokens_per_s:,.0f} tokens a second measured at {short(a.measured.active)}): "
        f"model.heads = {c.heads}, model.d_model = {c.d_model}, model.d_ff = {c.d_ff}"
    )


def span(seconds: float) -> str:
    """
    >>> span(42), span(600), span(5400)
    ('42 s', '10 min', '1.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _pretrain_warnings(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    p, start = recipe.pretrain, recipe.start
    assert p is not None
    if p.mtp_weight > 0 and config.mtp_layers == 0:
        yield f"pretrain.mtp_weight = {p.mtp_weight}: the model has no MTP layer (model.mtp_layers = 0)"
    if p.per_head and p.optimizer == "adamw":
        yield "pretrain.per_head: is about Muon, and optimizer is adamw"
    if start.model and recipe.data.tokenizer:
        yield f"data.tokenizer: fits only if it is the one of start.model = {start.model}"
    for i, s in enumerate(p.stages):
        if s.context > config.max_position:
            yield f"pretrain.stages[{i}].context = {s.context}: the model ends at {config.max_position} positions"
        if s.batch_tokens is not None and s.batch_tokens < s.context:
            yield f"pretrain.stages[{i}].batch_tokens = {s.batch_tokens}: a step is at least one row of {s.context}"
    if recipe.cold is not None:
        yield "[cold]: nonet pretrain has no cold start; run it afterwards with start.model = the result"
