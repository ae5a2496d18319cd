"""config.json in and out: the Hugging Face fields of llama, qwen2, qwen3 and kimi_linear <-> ModelConfig.

Owns: which field means what, and the keys of each family. What the standard keys of a family cannot say (a field the
family has no key for, or a default it spells out) is kept under "nonet". Invariant: from_json(to_json(c)) == c for
every ModelConfig. Refuses, naming field and value: any setting that would change the maths and that the model does not
implement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet.config import build
from nonet.model.config import Mixer, ModelConfig, Rope, k3_mixers
from nonet.types import UserError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
}

# ModelConfig field -> config.json key; a dot descends into a table
COMMON = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "d_ff": "intermediate_size",
    "heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "max_position": "max_position_embeddings",
    "mtp_layers": "num_nextn_predict_layers",
}
KIMI = {
    "activation": "hidden_act",
    "situ_beta": "activation_situ_beta",
    "situ_linear_beta": "activation_situ_linear_beta",
    "mlp_bias": "mlp_bias",
    "kda_head_dim": "linear_attn_config.head_dim",
    "conv_kernel": "linear_attn_config.short_conv_kernel_size",
    "gate_lower_bound": "linear_attn_config.gate_lower_bound",
    "decay_rank": "linear_attn_config.decay_rank",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
# transformers' values for absent keys; a key with none here must be present
DEFAULTS = {"tie_embeddings": False, "init_std": 0.02, "mtp_layers": 0, "mlp_bias": False}

# key -> the values under which our maths is right; absent counts as None
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "attn_res_block_size": (None, 0),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
}
KIMI_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("situ", "silu"),
    "mla_use_nope": (True,),
    "mla_use_output_gate": (True,),
    "linear_attn_config.use_full_rank_gate": (True,),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one sentence about why not."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise UserError(f"{path}: no such file; a model directory needs {path.name}") from e
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not readable as JSON ({e}); replace the file") from e
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}, not an object; replace the file")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------- reading


def from_json(raw: Mapping[str, Any], file: Path | str) -> ModelConfig:
    """The ModelConfig a config.json describes; `file` is only for messages."""
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        raise UserError(
            f"{file}: model_type = {family!r} (architectures = {raw.get('architectures')}) is not implemented; "
            f"use a model of type {', '.join(ARCHITECTURES)}"
        )
    _refuse(raw, NEUTRAL, file)
    values = _kimi(raw, file) if family == "kimi_linear" else _decoder(raw, str(family), file)
    ours = raw.get("nonet", {})
    if not isinstance(ours, Mapping):
        raise UserError(f"{file}: nonet = {ours!r}: must be an object of model fields; remove it or correct it")
    try:
        return build(ModelConfig, {**values, **ours})
    except UserError as e:
        raise UserError(f"{file}: {e}") from e


def _refuse(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], file: Path | str) -> None:
    for key, allowed in neutral.items():
        value = _get(raw, key)
        if value not in allowed:
            wanted = " or ".join("absent" if a is None else repr(a) for a in allowed)
            raise UserError(f"{file}: {key} = {value!r} is not implemented; only {wanted} is")


def _get(raw: Mapping[str, Any], key: str) -> Any:
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any, kind: type, key: str, file: Path | str) -> Any:
    good = {
        int: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        float: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        bool: isinstance(value, bool),
    }
    if not good[kind]:
        wanted = {int: "a positive integer", float: "a finite number", bool: "true or false"}[kind]
        raise UserError(f"{file}: {key} = {value!r}: must be {wanted}; correct the config")
    return value


def _take(raw: Mapping[str, Any], keys: Mapping[str, str], defaults: Mapping[str, Any], file: Path | str) -> dict:
    """Values of `keys`, checked against the types ModelConfig declares and named as the file names them."""
    out: dict[str, Any] = {}
    for field, key in keys.items():
        value = _get(raw, key)
        if value is None:
            if field not in defaults:
                raise UserError(f"{file}: {key} is missing; add it")
            value = defaults[field]
        kind = ModelConfig.model_fields[field].annotation
        out[field] = _number(value, kind, key, file) if kind in (int, float, bool) else value
    if out.get("mtp_layers", 0) not in (0, 1):
        raise UserError(f"{file}: num_nextn_predict_layers = {out['mtp_layers']!r} is not implemented; only 0 or 1 is")
    return out


def _decoder(raw: Mapping[str, Any], family: str, file: Path | str) -> dict[str, Any]:
    _refuse(raw, {"hidden_act": (None, "silu", "swish")}, file)
    out = _take(raw, COMMON, DEFAULTS | {"norm_eps": 1e-6, "max_position": 2048 if family == "llama" else 32768}, file)
    _refuse_sliding(raw, family, out["layers"], file)
    heads, d = out["heads"], out["d_model"]
    kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
    if kv_heads is None and family != "llama":
        raise UserError(f"{file}: num_key_value_heads is missing; add it")
    kv_heads = heads if kv_heads is None else _number(kv_heads, int, "num_key_value_heads", file)
    if heads % kv_heads:
        raise UserError(f"{file}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    if head_dim is None and family != "qwen3" and d % heads:
        raise UserError(f"{file}: hidden_size = {d} is not a multiple of num_attention_heads = {heads}; add head_dim")
    if head_dim is None:
        head_dim = 128 if family == "qwen3" else d // heads
    bias = _number(raw.get("attention_bias") or False, bool, "attention_bias", file)
    mlp_bias = _number(raw.get("mlp_bias") or False, bool, "mlp_bias", file)
    if mlp_bias and family != "llama":
        raise UserError(f"{file}: mlp_bias = true is not implemented for {family}; only false is")
    return {
        **out,
        "mixers": ("gqa",) * out["layers"],
        "activation": "silu",
        "mlp_bias": mlp_bias,
        "kv_heads": kv_heads,
        "head_dim": _number(head_dim, int, "head_dim", file),
        "qkv_bias": True if family == "qwen2" else bias,
        "o_bias": False if family == "qwen2" else bias,
        "qk_norm": family == "qwen3",
        "rope": _rope(raw, out["max_position"], file),
    }


def _refuse_sliding(raw: Mapping[str, Any], family: str, layers: int, file: Path | str) -> None:
    """Sliding-window attention, by transformers' rules for when a qwen layer uses it."""
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    for kind in kinds or ():
        if kind != "full_attention":
            raise UserError(f"{file}: layer_types names {kind!r}, which is not implemented; only 'full_attention' is")
    if family != "llama":
        first = raw.get("max_window_layers", 28)
        in_use = raw.get("use_sliding_window", False) and not kinds and first < layers
        window = window if in_use else None
    if window is not None:
        raise UserError(f"{file}: sliding_window = {window!r} is in use and not implemented; only full attention is")


def _rope(raw: Mapping[str, Any], max_position: int, file: Path | str) -> Rope:
    """Rotary settings: rope_theta and rope_scaling, or transformers 5's rope_parameters."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    table = raw.get(key) or {}
    if not isinstance(table, Mapping):
        raise UserError(f"{file}: {key} = {table!r}: must be an object; correct the config")
    other = raw.get("rope_parameters")
    if key == "rope_scaling" and other and dict(other) != dict(table):
        raise UserError(f"{file}: rope_scaling = {table} and rope_parameters = {other} disagree; keep one")
    kind = table.get("rope_type", table.get("type", "default"))
    scales = {"default": [], "linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    if kind not in scales:
        raise UserError(f"{file}: {key}.rope_type = {kind!r} is not implemented; only {', '.join(scales)} are")
    allowed = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    for name in sorted(set(table) - allowed - set(scales["llama3"])):
        raise UserError(f"{file}: {key}.{name} = {table[name]!r} is not implemented; remove it if it is not in use")
    _refuse(table, {"partial_rotary_factor": (None, 1)}, f"{file}: {key}")
    thetas = [t for t in (table.get("rope_theta"), raw.get("rope_theta")) if t is not None]
    if len(set(thetas)) > 1:
        raise UserError(f"{file}: rope_theta = {thetas[1]} and {key}.rope_theta = {thetas[0]} disagree; keep one")
    out: dict[str, Any] = {"theta": _number((thetas or [10000.0])[0], float, "rope_theta", file)}
    for name in scales[kind]:
        out[name] = _number(table.get(name), float, f"{key}.{name}", file)
    if kind == "llama3":
        name = "original_max_position_embeddings"
        length = next((v for v in (raw.get(name), table.get(name)) if v is not None), max_position)
        out["original_max_position"] = _number(length, int, f"{key}.{name}", file)
    return Rope(scaling="none" if kind == "default" else kind, **out)


def _kimi(raw: Mapping[str, Any], file: Path | str) -> dict[str, Any]:
    linear = raw.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise UserError(f"{file}: linear_attn_config is missing; a kimi_linear model needs it")
    _refuse(raw, KIMI_NEUTRAL, file)
    defaults = {**DEFAULTS, "situ_beta": 4.0, "situ_linear_beta": 25.0, "decay_rank": linear.get("head_dim")}
    out = _take(raw, COMMON | KIMI, defaults, file)
    if linear.get("num_heads", out["heads"]) != out["heads"]:
        raise UserError(
            f"{file}: linear_attn_config.num_heads = {linear['num_heads']} differs from num_attention_heads = "
            f"{out['heads']}, which is not implemented; only equal counts are"
        )
    kda, full = linear.get("kda_layers", []), linear.get("full_attn_layers", [])
    if sorted([*kda, *full], key=str) != sorted(range(1, out["layers"] + 1), key=str):
        raise UserError(
            f"{file}: linear_attn_config.kda_layers and full_attn_layers must name each of the layers 1 to "
            f"{out['layers']} once; correct the lists"
        )
    mixers: tuple[Mixer, ...] = tuple("kda" if i + 1 in kda else "mla" for i in range(out["layers"]))
    return {**out, "mixers": () if mixers == k3_mixers(out["layers"]) else mixers}


# ------------------------------------------------------------------- writing


def family_of(config: ModelConfig) -> str:
    """The standard family whose maths this is; kimi_linear, ours alone, if none."""
    if set(config.layer_mixers) != {"gqa"} or config.activation != "silu" or config.rope is None:
        return "kimi_linear"
    same_bias = config.qkv_bias == config.o_bias
    if config.qk_norm:
        return "qwen3" if same_bias and not config.mlp_bias else "kimi_linear"
    if config.qkv_bias and not config.o_bias and not config.mlp_bias:
        return "qwen2"
    return "llama" if same_bias else "kimi_linear"


def to_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json whose standard keys say all that other software needs."""
    family = family_of(config)
    out: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    keys = COMMON | KIMI if family == "kimi_linear" else COMMON
    for field, key in keys.items():
        table, _, leaf = key.rpartition(".")
        (out.setdefault(table, {}) if table else out)[leaf] = getattr(config, field)
    if family == "kimi_linear":
        out |= _kimi_keys(config, out)
    else:
        out |= _decoder_keys(config, family)
        if not config.mtp_layers:
            del out["num_nextn_predict_layers"]
    read, whole = from_json(out, "config.json").model_dump(mode="json"), config.model_dump(mode="json")
    unsaid = {field: value for field, value in whole.items() if value != read[field]}
    return out | {"nonet": unsaid} if unsaid else out


def _decoder_keys(config: ModelConfig, family: str) -> dict[str, Any]:
    rope = config.rope or Rope()
    scaling: dict[str, Any] | None = None
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if scaling and rope.scaling == "llama3":
        scaling["low_freq_factor"], scaling["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_position
    out: dict[str, Any] = {
        "hidden_act": "silu",
        "num_key_value_heads": config.gqa_kv_heads,
        "head_dim": config.gqa_head_dim,
        "attention_dropout": 0.0,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }
    if family == "llama":
        out |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if family == "qwen3":
        out["attention_bias"] = config.qkv_bias
    if family != "llama":
        out |= {"use_sliding_window": False, "max_window_layers": config.layers}
    return out


def _kimi_keys(config: ModelConfig, out: Mapping[str, Any]) -> dict[str, Any]:
    numbered = list(enumerate(config.layer_mixers, 1))
    linear = {
        **out["linear_attn_config"],
        "num_heads": config.heads,
        "use_full_rank_gate": True,
        "kda_layers": [i for i, mixer in numbered if mixer == "kda"],
        "full_attn_layers": [i for i, mixer in numbered if mixer != "kda"],
    }
    return {
        "linear_attn_config": linear,
        "num_key_value_heads": config.heads,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 0,
    }
