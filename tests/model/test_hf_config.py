"""config.json <-> ModelConfig: nothing is lost, other software is told the truth, what we lack is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from nonet.model import ModelConfig, Rope
from nonet.model.hf_config import family_of, from_json, to_json
from nonet.pipeline.recipe import load_recipe
from nonet.quant import QuantConfig
from nonet.types import UserError

K3_RECIPE = Path(__file__).parents[2] / "recipes" / "k3.toml"
KIMI = ModelConfig(vocab_size=97, tie_embeddings=False, **tiny.KIMI_LINEAR)


def official() -> dict[str, Any]:
    """The released checkpoint's config.json, as far as k3 sections 1.1 and 1.6 give it."""
    full = [*range(4, 93, 4), 93]
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    weights |= {"scale_dtype": "torch.uint8", "observer": "minmax", "dynamic": False}
    ignored = ["self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*"]
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": weights}
    text = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_hidden_layers": 93,
        "hidden_size": 7168, "vocab_size": 163840, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "initializer_range": 0.02, "max_position_embeddings": 1048576, "num_attention_heads": 96,
        "num_key_value_heads": 96, "intermediate_size": 33792, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "moe_renormalize": True, "routed_scaling_factor": 1.0, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0, "full_attn_layers": full,
            "kda_layers": [i for i in range(1, 94) if i not in full],
        },
        "attn_res_block_size": 12, "num_nextn_predict_layers": 0, "use_cache": True,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [f"re:.*{name}" for name in (*ignored, "vision_tower.*", "mm_projector.*")],
        },
    }  # fmt: skip
    top = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "tie_word_embeddings": False}
    return {**top, "text_config": text, "vision_config": {"vt_hidden_size": 1024}}


def edited(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy with fields of the text model changed; `a__b` reaches into table a."""
    out = json.loads(json.dumps(raw))
    for key, value in fields.items():
        *tables, leaf = key.split("__")
        table = out.get("text_config", out)
        for name in tables:
            table = table[name]
        table[leaf] = value
    return out


def refused(raw: dict[str, Any], *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        from_json(raw, "config.json")
    for part in ("config.json", *parts):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def text_of(raw: dict[str, Any]) -> dict[str, Any]:
    return raw.get("text_config", raw)


# ---------------------------------------------------------------- round trips

mixer = st.sampled_from(["gqa", "kda", "mla"])
rope = st.builds(
    Rope,
    theta=st.floats(100, 1e7),
    scaling=st.sampled_from(["none", "linear", "llama3"]),
    factor=st.floats(1, 40),
    original_max_position=st.integers(16, 9000),
)
moe = st.fixed_dictionaries(
    {
        "experts": st.integers(3, 9),
        "top_k": st.integers(1, 2),
        "d_ff": st.sampled_from([32, 64]),
        "shared": st.integers(0, 2),
        "latent": st.sampled_from([0, 32]),
        "dense_layers": st.integers(0, 8),
        "renormalise": st.booleans(),
        "scale": st.sampled_from([1.0, 2.446]),
        "balance": st.sampled_from(["quantile", "sign", "none"]),
        "sign_step": st.sampled_from([1e-3, 2e-3]),
    }
)
quant = st.builds(
    QuantConfig,
    routed_expert_weights=st.sampled_from(["mxfp4", "mxfp4", "none", "mxfp8"]),
    routed_expert_inputs=st.sampled_from(["mxfp8", "none", "mxfp4"]),
    rule=st.sampled_from(["floor", "even", "ceil", "rceil"]),
    zero_saturated=st.booleans(),
)
FREE: dict[str, Any] = dict(
    vocab_size=st.integers(1, 999),
    d_ff=st.integers(1, 99),
    head_dim=st.sampled_from([4, 8]),
    norm_eps=st.sampled_from([1e-5, 1e-6, 3.3e-6]),
    init_std=st.sampled_from([0.02, 0.006]),
    max_position=st.sampled_from([1 << 20, 4096]),
    situ_beta=st.floats(1, 9),
    v_head_dim=st.integers(1, 40),
    kv_lora_rank=st.integers(1, 40),
    qk_nope_head_dim=st.integers(1, 9),
    qk_rope_head_dim=st.sampled_from([0, 2, 8]),
    q_lora_rank=st.integers(0, 40),
    tie_embeddings=st.booleans(),
    mtp_layers=st.sampled_from([0, 1]),
)
OURS: dict[str, Any] = dict(
    activation=st.sampled_from(["silu", "situ"]),
    attn_res_block=st.integers(0, 4),
    decay=st.sampled_from(["bounded", "softplus", "none"]),
    gate_lower_bound=st.floats(-5, -1),
    decay_rank=st.sampled_from([5, 8]),
    gate_rank=st.sampled_from([0, 5, 8]),
    conv_kernel=st.integers(1, 5),
    quant=st.one_of(st.none(), quant),
    **{flag: st.booleans() for flag in ("mlp_bias", "qkv_bias", "o_bias", "qk_norm", "mla_gate")},
)
PUBLISHED: dict[str, Any] = dict(
    activation=st.just("silu"), decay=st.just("softplus"), decay_rank=st.just(8), gate_rank=st.just(8),
    mla_gate=st.just(False),
)  # fmt: skip


@st.composite
def configs(draw, fields: dict[str, Any], kinds: Any, ropes: bool = True, experts: Any = moe) -> ModelConfig:
    """Any combination that ModelConfig accepts."""
    layers, heads, kv = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    values = {name: draw(value) for name, value in {**FREE, **fields}.items()}
    mixers = draw(st.one_of(st.just([]), st.lists(kinds, min_size=layers, max_size=layers)))
    values |= dict(layers=layers, heads=heads * kv, kv_heads=kv, mixers=tuple(mixers), kda_head_dim=8, d_model=36)
    if table := draw(st.one_of(st.none(), experts)):
        values["moe"] = {**table, "latent": 32 if values.get("quant") else table["latent"]}
    if ropes:
        values["rope"] = draw(st.one_of(st.none(), rope))
        turned = values["qk_rope_head_dim"] > 0 and not (values["rope"] and "gqa" in mixers)
        values["mla_rope"] = draw(st.one_of(st.none(), rope)) if turned else None
    return ModelConfig(**values)


ANY = configs(OURS, mixer)
PLAIN = {"attn_res_block": st.just(0), "activation": st.just("silu")}
GQA = configs({**OURS, **PLAIN}, st.just("gqa"), experts=st.none())
LIKE_KIMI = configs(PUBLISHED, st.sampled_from(["kda", "mla"]), ropes=False)


@settings(max_examples=400, deadline=None)
@given(st.one_of(ANY, GQA, LIKE_KIMI))
def test_every_config_round_trips_exactly(config: ModelConfig):
    text = json.dumps(to_json(config))
    assert from_json(json.loads(text), "config.json") == config


@settings(max_examples=300, deadline=None)
@given(st.one_of(ANY, GQA, LIKE_KIMI))
def test_standard_families_say_all_that_matters_in_standard_keys(config: ModelConfig):
    """Software that has never heard of `nonet` must compute the same thing from the same file."""
    family = family_of(config)
    if family == "kimi_k3":
        return
    raw = to_json(config)
    raw.pop("nonet", None)
    plain = from_json(raw, "config.json")
    live = {"vocab_size", "d_model", "layers", "layer_mixers", "d_ff", "heads", "norm_eps", "tie_embeddings"}
    live |= {"activation", "mlp_bias", "mtp_layers", "max_position", "attn_res_block"}
    if family == "kimi_linear":
        live |= {"kda_head_dim", "conv_kernel", "decay", "decay_rank", "gate_rank", "q_lora_rank", "kv_lora_rank"}
        live |= {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_gate", "mla_rope"}
    else:
        live |= {"gqa_kv_heads", "gqa_head_dim", "qkv_bias", "o_bias", "qk_norm"}
        assert plain.rope is not None and config.rope is not None
        assert (plain.rope.theta, plain.rope.scaling) == (config.rope.theta, config.rope.scaling)
    assert {field: getattr(plain, field) for field in live} == {field: getattr(config, field) for field in live}
    trained = {"balance": "none", "sign_step": 1.0}  # these steer training only
    assert (plain.moe and plain.moe.model_copy(update=trained)) == (
        config.moe and config.moe.model_copy(update=trained)
    )


def test_unset_fields_come_back_unset():
    config = ModelConfig(vocab_size=97, d_model=32, layers=3, d_ff=48, heads=4, mixers=("gqa",) * 3, rope=Rope())
    assert from_json(to_json(config), "config.json") == config
    hybrid = ModelConfig(vocab_size=97, d_model=32, layers=3, d_ff=48, heads=4)
    assert hybrid.mixers == () == from_json(to_json(hybrid), "config.json").mixers


# ------------------------------------------------------------------- families


def test_families():
    kinds = {kind: family_of(ModelConfig(vocab_size=9, **fields)) for kind, fields in tiny.KINDS.items()}
    assert kinds == {"hybrid": "kimi_k3", "gqa": "qwen3", "k3": "kimi_k3", "kimi_linear": "kimi_linear"}


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "situ"},
        {"attn_res_block": 2},
        {"decay": "bounded"},
        {"decay": "none"},
        {"decay_rank": 7},
        {"gate_rank": 0},
        {"gate_rank": 7},
        {"mla_gate": True},
        {"mla_rope": Rope()},
        {"mlp_bias": True},
        {"conv_kernel": 1},
        {"mixers": ("kda", "kda", "gqa", "mla")},
        {"mixers": ("kda", "kda", "kda", "kda")},
        {"moe": {**tiny.KIMI_LINEAR["moe"], "latent": 16}},
        {"moe": {**tiny.KIMI_LINEAR["moe"], "shared": 0}},
        {"quant": QuantConfig(), "moe": {**tiny.KIMI_LINEAR["moe"], "d_ff": 32}},
    ],
    ids=str,
)
def test_what_transformers_kimi_linear_would_ignore_is_not_called_kimi_linear(change: dict[str, Any]):
    assert family_of(KIMI) == "kimi_linear"
    config = ModelConfig.model_validate({**KIMI.model_dump(), **change})
    assert family_of(config) == "kimi_k3"
    assert from_json(to_json(config), "config.json") == config


def test_the_released_config_is_the_recipes_model():
    """MTP was trained and not released; MXFP8 inputs are a choice of training that the file does not mention."""
    recipe = load_recipe([K3_RECIPE]).model_config_for(163840)
    got = from_json(official(), "config.json")
    assert got == recipe.model_copy(update={"mtp_layers": 0, "quant": QuantConfig(routed_expert_inputs="none")})


def test_we_write_the_released_fields():
    config = from_json(official(), "config.json")
    raw, released = to_json(config), official()
    assert {k: raw[k] for k in ("architectures", "model_type", "tie_word_embeddings")} == {
        k: released[k] for k in ("architectures", "model_type", "tie_word_embeddings")
    }
    ours, theirs = text_of(raw), text_of(released)
    quant, released_quant = ours.pop("quantization_config"), theirs.pop("quantization_config")
    assert set(theirs) - set(ours) == {"use_cache"}
    assert {key: ours[key] for key in theirs if key in ours} == {k: v for k, v in theirs.items() if k != "use_cache"}
    assert set(ours) - set(theirs) == {"mlp_bias"} and ours["mlp_bias"] is False
    assert quant["ignore"] == released_quant["ignore"]


def test_kimi_linear_in_the_published_spelling():
    """Kimi-Linear-48B-A3B: no K3 field, heads of a low-rank gate, experts as wide as the model."""
    raw = {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
        "model_max_length": 1048576, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
        "hidden_act": "silu", "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        },
    }  # fmt: skip
    config = from_json(raw, "config.json")
    assert family_of(config) == "kimi_linear"
    assert (config.decay, config.decay_rank, config.gate_rank, config.q_lora_rank) == ("softplus", 128, 128, 0)
    assert (config.mla_gate, config.attn_res_block, config.mixers) == (False, 0, ())
    assert config.moe is not None
    assert (config.moe.experts, config.moe.latent, config.moe.dense_layers, config.moe.scale) == (256, 0, 1, 2.446)
    again = to_json(config)
    assert {k: again[k] for k in raw if k in again} == {k: v for k, v in raw.items() if k in again}
    assert set(raw) - set(again) == {"head_dim", "rope_theta", "rope_scaling"}


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        ({"mla_use_nope": False}, ["mla_use_nope = False"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling"]),
        ({"attention_bias": True}, ["attention_bias = True"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads = 8", "num_attention_heads = 96"]),
        ({"linear_attn_config": None}, ["linear_attn_config is missing"]),
        ({"linear_attn_config": 3}, ["linear_attn_config = 3"]),
        ({"linear_attn_config__num_heads": 8}, ["linear_attn_config.num_heads = 8", "num_attention_heads = 96"]),
        ({"linear_attn_config__head_dim": None}, ["linear_attn_config.head_dim is missing"]),
        ({"linear_attn_config__use_full_rank_gate": "yes"}, ["use_full_rank_gate = 'yes'", "true or false"]),
        ({"linear_attn_config__kda_layers": [0, 1]}, ["kda_layers", "1 to 93"]),
        ({"linear_attn_config__gate_lower_bound": -6.0}, ["gate_lower_bound = -6.0"]),
        ({"layer_types": ["full_attention"] * 93}, ["layer_types", "disagree"]),
        ({"layer_types": ["sliding_attention"] * 93}, ["layer_types", "linear_attention, full_attention"]),
        ({"mlp_layer_types": ["sparse"] * 92 + ["dense"]}, ["mlp_layer_types", "only dense layers followed by"]),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 91}, ["first_k_dense_replace = 1", "disagree"]),
        ({"moe_router_activation_func": "softmax"}, ["moe_router_activation_func = 'softmax'"]),
        ({"topk_method": "greedy"}, ["topk_method = 'greedy'"]),
        ({"num_expert_group": 8}, ["num_expert_group = 8"]),
        ({"n_group": 8}, ["n_group = 8"]),
        ({"topk_group": 4}, ["topk_group = 4"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq = 2"]),
        ({"latent_moe_use_norm": False}, ["latent_moe_use_norm = False"]),
        ({"num_experts_per_token": 896}, ["num_experts_per_token = 896", "num_experts = 896"]),
        ({"num_experts_per_tok": 8}, ["num_experts_per_token = 16 and num_experts_per_tok = 8 disagree"]),
        ({"routed_scaling_factor": None}, ["routed_scaling_factor is missing"]),
        ({"num_shared_experts": -1}, ["num_shared_experts = -1", "at least 0"]),
        ({"first_k_dense_replace": None}, ["first_k_dense_replace is missing"]),
        ({"routed_expert_hidden_size": 3600}, ["3600 x 3072", "blocks of 32"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers = 2"]),
        ({"quantization_config__format": "nvfp4-pack-quantized"}, ["text_config.quantization_config.format"]),
        ({"quantization_config__config_groups__group_0__weights__num_bits": 8}, ["weights.num_bits = 8"]),
        ({"quantization_config__ignore": ["re:.*experts.*"]}, ["quantization_config.ignore names the experts"]),
        ({"num_experts": 0}, ["quantization_config is set, but num_experts"]),
        ({"model_type": "kimi_k2"}, ["text_config.model_type = 'kimi_k2'"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings = True and tie_word_embeddings = False disagree"]),
        ({"nonet": {"moe": {"expert": 2}}}, ["moe.expert", "did you mean moe.experts"]),
        ({"hidden_size": None}, ["text_config.hidden_size is missing"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_k3_field_that_we_do_not_implement(fields: dict[str, Any], parts: list[str]):
    refused(edited(official(), **fields), *parts)


def test_k3_without_its_text_model():
    raw = official()
    del raw["text_config"]
    refused(raw, "text_config is missing")


def test_quantization_may_be_announced_at_the_top():
    raw = official()
    raw["quantization_config"] = raw["text_config"].pop("quantization_config")
    assert from_json(raw, "config.json") == from_json(official(), "config.json")
