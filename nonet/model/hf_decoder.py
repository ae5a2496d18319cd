"""config.json of llama, qwen2 and qwen3 <-> ModelConfig.

Owns: what these families' fields mean, among them rotary scaling and sliding windows. Refuses, naming field and value:
whatever would change the maths and is not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet.model.config import ModelConfig, Rope
from nonet.model.hf_fields import COMMON, DEFAULTS, NEUTRAL, Fields

FAMILIES = ("llama", "qwen2", "qwen3")
ALONE: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_res_block_size": (None, 0),
    "hidden_act": (None, "silu", "swish"),
}


def family(config: ModelConfig) -> str | None:
    """The family whose maths this is; None if it is none of these."""
    plain = set(config.layer_mixers) == {"gqa"} and config.activation == "silu" and config.rope is not None
    if not plain or config.moe is not None or config.attn_res_block:
        return None
    same_bias = config.qkv_bias == config.o_bias
    if config.qk_norm:
        return "qwen3" if same_bias and not config.mlp_bias else None
    if config.qkv_bias and not config.o_bias and not config.mlp_bias:
        return "qwen2"
    return "llama" if same_bias else None


# ------------------------------------------------------------------- reading


def read(raw: Mapping[str, Any], family: str, file: Path | str) -> dict[str, Any]:
    """ModelConfig's values."""
    f = Fields(raw, file)
    f.refuse(ALONE)
    out = f.take(COMMON, DEFAULTS | {"norm_eps": 1e-6, "max_position": 2048 if family == "llama" else 32768})
    _refuse_sliding(f, family, out["layers"])
    heads, d = out["heads"], out["d_model"]
    kv_heads = f.number(int, "num_key_value_heads", **({"default": heads} if family == "llama" else {}))
    if heads % kv_heads:
        f.fail(f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    if f.get("head_dim") is None and family != "qwen3" and d % heads:
        f.fail(f"hidden_size = {d} is not a multiple of num_attention_heads = {heads}; add head_dim")
    bias = f.number(bool, "attention_bias", default=False)
    mlp_bias = f.number(bool, "mlp_bias", default=False)
    if mlp_bias and family != "llama":
        f.fail(f"mlp_bias = true is not implemented for {family}; only false is")
    return {
        **out,
        "mixers": ("gqa",) * out["layers"],
        "activation": "silu",
        "mlp_bias": mlp_bias,
        "kv_heads": kv_heads,
        "head_dim": f.number(int, "head_dim", default=128 if family == "qwen3" else d // heads),
        "qkv_bias": True if family == "qwen2" else bias,
        "o_bias": False if family == "qwen2" else bias,
        "qk_norm": family == "qwen3",
        "rope": _rope(f, out["max_position"]),
    }


def _refuse_sliding(f: Fields, family: str, layers: int) -> None:
    """Sliding-window attention, by transformers' rules for when a qwen layer uses it."""
    window, kinds = f.get("sliding_window"), f.get("layer_types")
    for kind in kinds or ():
        if kind != "full_attention":
            f.fail(f"layer_types names {kind!r}, which is not implemented; only 'full_attention' is")
    if family != "llama":
        first = f.raw.get("max_window_layers", 28)
        in_use = f.raw.get("use_sliding_window", False) and not kinds and first < layers
        window = window if in_use else None
    if window is not None:
        f.fail(f"sliding_window = {window!r} is in use and not implemented; only full attention is")


def _rope(f: Fields, max_position: int) -> dict[str, Any]:
    """Rotary settings: rope_theta and rope_scaling, or transformers 5's rope_parameters."""
    key = "rope_scaling" if f.raw.get("rope_scaling") else "rope_parameters"
    table, other = f.table(key) or {}, f.table("rope_parameters")
    if key == "rope_scaling" and other and dict(other) != dict(table):
        f.fail(f"rope_scaling = {table} and rope_parameters = {other} disagree; keep one")
    kind = table.get("rope_type", table.get("type", "default"))
    scales = {"default": [], "linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    if kind not in scales:
        f.fail(f"{key}.rope_type = {kind!r} is not implemented; only {', '.join(scales)} are")
    allowed = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    for name in sorted(set(table) - allowed - set(scales["llama3"])):
        f.fail(f"{key}.{name} = {table[name]!r} is not implemented; remove it if it is not in use")
    f.refuse({f"{key}.partial_rotary_factor": (None, 1)})
    out: dict[str, Any] = {"theta": f.number(float, "rope_theta", f"{key}.rope_theta", default=10000.0)}
    for name in scales[kind]:
        out[name] = f.number(float, f"{key}.{name}")
    if kind == "llama3":
        name = "original_max_position_embeddings"
        # the file's own length wins over the table's, as in transformers
        inside = f.number(int, f"{key}.{name}", default=max_position)
        out["original_max_position"] = f.number(int, name, default=inside)
    return Rope(scaling="none" if kind == "default" else kind, **out).model_dump()


# ------------------------------------------------------------------- writing


def write(config: ModelConfig, family: str) -> dict[str, Any]:
    """The standard keys."""
    out: dict[str, Any] = {key: getattr(config, field) for field, key in COMMON.items()}
    if not config.mtp_layers:
        del out["num_nextn_predict_layers"]
    rope = config.rope or Rope()
    out |= {
        "hidden_act": "silu",
        "num_key_value_heads": config.gqa_kv_heads,
        "head_dim": config.gqa_head_dim,
        "attention_dropout": 0.0,
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(rope),
    }
    if family == "llama":
        out |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if family == "qwen3":
        out["attention_bias"] = config.qkv_bias
    if family != "llama":
        out |= {"use_sliding_window": False, "max_window_layers": config.layers}
    return out


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        out["low_freq_factor"], out["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
        out["original_max_position_embeddings"] = rope.original_max_position
    return out
