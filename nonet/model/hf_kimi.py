"""config.json of kimi_k3 and kimi_linear <-> ModelConfig (k3 section 1.1).

K3's file nests its text model under text_config (model_type kimi_linear), beside a vision tower that is not read. A
Kimi-Linear file is such a table at the top, as published or as transformers writes it. Which of K3's parts are in use
is told by which fields are there:

    linear_attn_config.gate_lower_bound      bounded decay; absent: softplus
    linear_attn_config.use_full_rank_gate    full KDA output gate; absent: a pair of rank head_dim
    mla_use_output_gate, attn_res_block_size, routed_expert_hidden_size, quantization_config: absent means without

Owns: these fields, their spellings, and when transformers' kimi_linear, which ignores every one of K3's own, computes a
model. Refuses, naming field and value: other routers, rotated MLA, experts in groups, other quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet.model.config import Mixer, ModelConfig, k3_mixers
from nonet.model.hf_fields import COMMON, DEFAULTS, NEUTRAL, Fields
from nonet.quant import pack

ARCHITECTURE = {"kimi_k3": "KimiK3ForConditionalGeneration", "kimi_linear": "KimiLinearForCausalLM"}
LINEAR = "linear_attn_config"
MAX_POSITION = ("max_position_embeddings", "model_max_length")

# ModelConfig field -> config.json key, where the value is simply the field's
PLAIN = {
    **{field: key for field, key in COMMON.items() if field != "max_position"},
    "activation": "hidden_act",
    "mlp_bias": "mlp_bias",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
SITU = {"situ_beta": "activation_situ_beta", "situ_linear_beta": "activation_situ_linear_beta"}
FIXED: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "hidden_act": ("situ", "silu"),
    "attention_bias": (None, False),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
}
ROUTER: dict[str, tuple[Any, ...]] = {
    "moe_router_activation_func": (None, "sigmoid"),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
    "num_expert_group": (None, 1),
    "n_group": (None, 1),
    "topk_group": (None, 1),
}
# What quantization_config says: weights in MXFP4, inputs untouched. Training may add MXFP8 inputs and a scale rule.
PACKED = {"routed_expert_inputs": "none"}


def is_kimi_linear(config: ModelConfig) -> bool:
    """Whether transformers' kimi_linear computes this model, to the letter of its code."""
    c, moe, head = config, config.moe, config.kda_head_dim
    kda = c.decay == "softplus" and c.gate_rank == c.decay_rank == head and c.conv_kernel > 1
    mla = not c.mla_gate and c.mla_rope is None and c.qk_nope_head_dim > 0 and c.qk_rope_head_dim > 0
    plain = c.activation == "silu" and not c.mlp_bias and not c.attn_res_block and c.quant is None
    experts = moe is None or (not moe.latent and moe.shared > 0)
    layers = "mla" in c.layer_mixers and "gqa" not in c.layer_mixers  # KDA alone fails over transformers' cache
    return layers and kda and mla and plain and experts


def is_packed(config: ModelConfig) -> bool:
    """Whether the routed experts are stored as MXFP4 codes."""
    return config.moe is not None and config.quant is not None and config.quant.routed_expert_weights == "mxfp4"


# ------------------------------------------------------------------- reading


def text_table(raw: Mapping[str, Any], file: Path | str) -> tuple[dict[str, Any], str]:
    """(fields of the text model, what their names begin with in this file)."""
    if raw.get("model_type") != "kimi_k3":
        return dict(raw), ""
    top = Fields(raw, file)
    text = top.table("text_config")
    if text is None:
        top.fail("text_config is missing; a kimi_k3 model needs it")
    if text.get("model_type") != "kimi_linear":
        top.fail(f"text_config.model_type = {text.get('model_type')!r} is not implemented; only 'kimi_linear' is")
    lifted = {key: top.get(f"text_config.{key}", key) for key in ("quantization_config", "tie_word_embeddings")}
    return {**text, **lifted}, "text_config."


def read(raw: Mapping[str, Any], file: Path | str, inside: str) -> dict[str, Any]:
    """ModelConfig's values from the fields of a text model."""
    f = Fields(raw, file, inside)
    f.refuse(FIXED)
    out = f.take(PLAIN, DEFAULTS, zero=("qk_nope_head_dim", "qk_rope_head_dim"))
    if f.number(int, "num_key_value_heads", default=out["heads"]) != out["heads"]:
        f.fail(
            f"num_key_value_heads = {f.get('num_key_value_heads')} differs from num_attention_heads = {out['heads']}, "
            f"which is not implemented for kimi; only equal counts are"
        )
    out |= {field: f.number(float, key, default=_default(field)) for field, key in SITU.items()}
    out["max_position"] = f.number(int, *MAX_POSITION, default=1 << 20)
    out["attn_res_block"] = f.number(int, "attn_res_block_size", default=0, low=0)
    out["q_lora_rank"] = f.number(int, "q_lora_rank", default=0, low=0)
    out["mla_gate"] = f.number(bool, "mla_use_output_gate", default=False)
    if f.get("mla_use_nope") not in (None, True) and not (f.table("nonet") or {}).get("mla_rope"):
        f.fail(f"mla_use_nope = {f.get('mla_use_nope')!r} is not implemented; only True is")
    out |= _kda(f, out["heads"])
    out["mixers"] = _mixers(f, out["layers"])
    out["moe"] = _moe(f, out["layers"])
    out["quant"] = _quant(f, out)
    return out


def _default(field: str) -> Any:
    return ModelConfig.model_fields[field].default


def _kda(f: Fields, heads: int) -> dict[str, Any]:
    if f.table(LINEAR) is None and f.get("linear_head_dim") is None:
        f.fail(f"{LINEAR} is missing; a kimi_linear model needs it")
    head_dim = f.number(int, f"{LINEAR}.head_dim", "linear_head_dim")
    key, count = f.found(f"{LINEAR}.num_heads", "linear_num_heads")
    if count not in (None, heads):
        f.fail(
            f"{key} = {count!r} differs from num_attention_heads = {heads}, which is not implemented; only equal "
            f"counts are"
        )
    lower = f.number(float, f"{LINEAR}.gate_lower_bound", default=None)
    full = f.number(bool, f"{LINEAR}.use_full_rank_gate", default=False)
    return {
        "kda_head_dim": head_dim,
        "conv_kernel": f.number(int, f"{LINEAR}.short_conv_kernel_size", "linear_conv_kernel_dim"),
        "decay": "softplus" if lower is None else "bounded",
        "gate_lower_bound": _default("gate_lower_bound") if lower is None else lower,
        "decay_rank": f.number(int, f"{LINEAR}.decay_rank", default=head_dim),
        "gate_rank": 0 if full else head_dim,
    }


def _mixers(f: Fields, layers: int) -> tuple[Mixer, ...]:
    """From the two lists of layers, counted from 1, or transformers' layer_types; () where they are K3's own order."""
    lists = {name: f.get(f"{LINEAR}.{name}") for name in ("kda_layers", "full_attn_layers")}
    found: list[tuple[Mixer, ...]] = []
    if any(v is not None for v in lists.values()):
        kda, full = (v if isinstance(v, list) else [] for v in lists.values())
        if sorted([*kda, *full], key=str) != sorted(range(1, layers + 1), key=str):
            f.fail(
                f"{LINEAR}.kda_layers and full_attn_layers must name each of the layers 1 to {layers} once; "
                f"correct the lists"
            )
        found.append(tuple("kda" if i + 1 in kda else "mla" for i in range(layers)))
    kinds = f.get("layer_types")
    if kinds is not None:
        known: dict[str, Mixer] = {"linear_attention": "kda", "full_attention": "mla"}
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            f.fail(f"layer_types = {kinds}: must name one of {', '.join(known)} for each of {layers} layers")
        found.append(tuple(known[kind] for kind in kinds))
    if not found:
        f.fail(f"{LINEAR}.kda_layers is missing; add the lists kda_layers and full_attn_layers")
    if found[0] != found[-1]:
        f.fail(f"layer_types and the lists of {LINEAR} disagree; keep one")
    return () if found[0] == k3_mixers(layers) else found[0]


def _moe(f: Fields, layers: int) -> dict[str, Any] | None:
    experts = f.number(int, "num_experts", "num_local_experts", default=0, low=0)
    if not experts:
        return None
    f.refuse(ROUTER)
    top_k = f.number(int, "num_experts_per_token", "num_experts_per_tok")
    if top_k >= experts:
        f.fail(f"num_experts_per_token = {top_k} of num_experts = {experts}: must be fewer; correct the config")
    latent = f.number(int, "routed_expert_hidden_size", default=0, low=0)
    if latent:
        f.refuse({"latent_moe_use_norm": (True,)})
    return {
        "experts": experts,
        "top_k": top_k,
        "d_ff": f.number(int, "moe_intermediate_size"),
        "shared": f.number(int, "num_shared_experts", "n_shared_experts", low=0),
        "latent": latent,
        "dense_layers": _dense_layers(f, layers),
        "renormalise": f.number(bool, "moe_renormalize", "norm_topk_prob", default=True),
        "scale": f.number(float, "routed_scaling_factor"),
    }


def _dense_layers(f: Fields, layers: int) -> int:
    """From first_k_dense_replace, or transformers' mlp_layer_types, whose dense layers must come first."""
    kinds = f.get("mlp_layer_types")
    if kinds is None:
        return f.number(int, "first_k_dense_replace", low=0)
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        f.fail(f"mlp_layer_types = {kinds} is not implemented; only dense layers followed by sparse ones are")
    first = f.number(int, "first_k_dense_replace", default=dense, low=0)
    if min(first, layers) != dense:
        f.fail(f"first_k_dense_replace = {first} and mlp_layer_types = {kinds} disagree; keep one")
    return first


def _quant(f: Fields, values: Mapping[str, Any]) -> dict[str, Any] | None:
    table = f.table("quantization_config")
    if table is None:
        return None
    scheme = pack.read_config(table, f"{f.file}: {f.inside}quantization_config")
    moe = values["moe"]
    if moe is None:
        f.fail("quantization_config is set, but num_experts is not and only experts are quantised; remove it")
    if not scheme.covers("language_model.model.layers.0.block_sparse_moe.experts.0.w1"):
        f.fail("quantization_config.ignore names the experts, which leaves nothing packed; remove quantization_config")
    width = moe["latent"] or values["d_model"]
    if width % 32 or moe["d_ff"] % 32:
        f.fail(
            f"quantization_config: experts of {width} x {moe['d_ff']} do not divide into blocks of 32; correct "
            f"routed_expert_hidden_size or moe_intermediate_size"
        )
    return dict(PACKED)


# ------------------------------------------------------------------- writing


def write(config: ModelConfig, family: str) -> dict[str, Any]:
    """The standard keys of a kimi_k3 or kimi_linear config.json."""
    text: dict[str, Any] = {key: getattr(config, field) for field, key in PLAIN.items()}
    text["num_key_value_heads"] = config.heads
    text["q_lora_rank"] = config.q_lora_rank or None
    text["mla_use_nope"] = config.mla_rope is None
    text[LINEAR] = _linear_keys(config)
    text |= _moe_keys(config)
    if family == "kimi_linear":
        # transformers' defaults for the ids are of the published vocabulary, which a smaller one does not have
        ids = {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {**_head(family), **text, "model_max_length": config.max_position, **ids}
    text["max_position_embeddings"] = config.max_position
    text["mla_use_output_gate"] = config.mla_gate
    text |= {key: getattr(config, field) for field, key in SITU.items()}
    if config.attn_res_block:
        text["attn_res_block_size"] = config.attn_res_block
    if config.mla_rope is not None:
        text["nonet"] = {"mla_rope": config.mla_rope.model_dump(mode="json")}
    if is_packed(config):
        text["quantization_config"] = pack.config_dict()
    tied = {"tie_word_embeddings": config.tie_embeddings}
    return {**_head(family), **tied, "text_config": {**_head("kimi_linear"), **text}}


def _head(family: str) -> dict[str, Any]:
    return {"architectures": [ARCHITECTURE[family]], "model_type": family}


def _linear_keys(config: ModelConfig) -> dict[str, Any]:
    numbered = list(enumerate(config.layer_mixers, 1))
    out: dict[str, Any] = {
        "head_dim": config.kda_head_dim,
        "num_heads": config.heads,
        "short_conv_kernel_size": config.conv_kernel,
        "kda_layers": [i for i, mixer in numbered if mixer == "kda"],
        "full_attn_layers": [i for i, mixer in numbered if mixer != "kda"],
    }
    if not config.gate_rank:
        out["use_full_rank_gate"] = True
    if config.decay == "bounded":
        out["gate_lower_bound"] = config.gate_lower_bound
    if config.decay_rank != config.kda_head_dim:
        out["decay_rank"] = config.decay_rank  # ours: everyone else takes head_dim
    return out


def _moe_keys(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {"num_experts": 0, "first_k_dense_replace": config.layers}
    out: dict[str, Any] = {
        "num_experts": moe.experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.shared,
        "moe_intermediate_size": moe.d_ff,
        "first_k_dense_replace": moe.dense_layers,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": moe.renormalise,
        "routed_scaling_factor": moe.scale,
    }
    if moe.latent:
        out |= {"routed_expert_hidden_size": moe.latent, "latent_moe_use_norm": True}
    return out
