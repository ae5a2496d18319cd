"""Directories in and out: exact round trips, and one sentence naming file and tensor for each way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_edit import edit_config, edit_weights, refusal
from safetensors.torch import load_file, save_file

from nonet.model import Model, ModelConfig, Rope, hf
from nonet.model.hf_config import from_json
from nonet.model.init import initialise
from nonet.types import UserError

SMALL = dict(vocab_size=97, d_model=32, layers=3, d_ff=48, heads=4)
GQA = dict(mixers=("gqa",) * 3, activation="silu", rope=Rope(), kv_heads=2, head_dim=8)
HYBRID = ModelConfig(
    **{**SMALL, "layers": 5}, kda_head_dim=8, q_lora_rank=12, kv_lora_rank=10, decay_rank=6, mtp_layers=1
)


def made(config: ModelConfig, seed: int = 0) -> Model:
    """A model in which no two tensors are alike, so that a swapped name cannot pass."""
    model = initialise(Model(config), seed)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.01)
    return model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    hf.save(made(ModelConfig(**SMALL, **GQA)), tmp_path)
    return tmp_path


# --------------------------------------------------------------- round trips


@pytest.mark.parametrize("shard", [10**9, 8_000])
@pytest.mark.parametrize("tie", [True, False])
def test_hybrid_with_mtp_round_trips_bitwise(shard: int, tie: bool, tmp_path: Path):
    model = made(HYBRID.model_copy(update={"tie_embeddings": tie}))
    hf.save(model, tmp_path, max_shard_bytes=shard)
    back = hf.load(tmp_path)
    assert back.config == model.config == hf.read_config(tmp_path)
    assert (back.lm_head.weight is back.embed_tokens.weight) == tie
    theirs = dict(back.named_parameters())
    assert list(theirs) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(p, theirs[name]), name
        assert theirs[name].requires_grad
    tokens = torch.arange(40).view(2, 20)
    hidden = model(tokens)
    assert torch.equal(hidden, back(tokens))
    assert torch.equal(model.mtp_logits(tokens, hidden), back.mtp_logits(tokens, hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path):
    model = made(ModelConfig(**SMALL, **GQA, mtp_layers=1))
    hf.save(model, tmp_path, dtype)
    back = hf.load(tmp_path)
    assert {p.dtype for p in back.parameters()} == {torch.float32}
    for p, q in zip(model.parameters(), back.parameters(), strict=True):
        assert torch.equal(p.to(dtype).float(), q)
    assert hf.load(tmp_path, dtype).embed_tokens.weight.dtype == dtype


def test_saving_again_replaces_every_earlier_file(tmp_path: Path):
    model = made(ModelConfig(**SMALL, **GQA))
    for shard in (8_000, 10**9, 20_000):
        hf.save(model, tmp_path, max_shard_bytes=shard)
        assert hf.load(tmp_path).config == model.config
    assert not list(tmp_path.glob(".writing*"))
    assert not (tmp_path / "model.safetensors").exists()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, ["'mixtral'", "MixtralForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type = 'yarn'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["'dynamic'"]),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}}, ["rope_parameters.rope_type"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, ["rope_theta = 10000.0", "disagree"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor is missing"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, ["rope_scaling.mrope_section"]),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0"]),
        ({"sliding_window": 4096}, ["sliding_window = 4096"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"num_hidden_layers": "3"}, ["num_hidden_layers = '3'", "positive integer"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps = nan"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers = 2"]),
        ({"num_local_experts": 8}, ["num_local_experts = 8"]),
        ({"nonet": {"fractoin": 1}}, ["fractoin"]),
    ],
)
def test_config_field_that_we_do_not_implement(directory: Path, fields: dict, parts: list[str]):
    edit_config(directory, **fields)
    refusal(directory, "config.json", *parts)


def test_qwen_sliding_window_counts_only_when_in_use(tmp_path: Path):
    hf.save(made(ModelConfig(**SMALL, **GQA, qkv_bias=True)), tmp_path)
    edit_config(tmp_path, sliding_window=64)
    assert hf.load(tmp_path).config.qkv_bias
    edit_config(tmp_path, use_sliding_window=True, max_window_layers=3)
    hf.load(tmp_path)
    edit_config(tmp_path, max_window_layers=2)
    refusal(tmp_path, "config.json", "sliding_window = 64")
    edit_config(tmp_path, use_sliding_window=False, layer_types=["full_attention", "sliding_attention"])
    refusal(tmp_path, "config.json", "'sliding_attention'")


def test_defaults_of_old_llama_configs(directory: Path):
    raw = json.loads((directory / "config.json").read_text())
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "tie_word_embeddings", "mlp_bias"):
        raw.pop(key)
    config = from_json(raw, "config.json")
    assert (config.kv_heads, config.head_dim, config.tie_embeddings) == (4, 8, False)
    assert config.rope == Rope()


def test_missing_directory_and_broken_config(tmp_path: Path):
    refusal(tmp_path / "absent", "absent/config.json", "no such file")
    (tmp_path / "config.json").write_text("{")
    refusal(tmp_path, "config.json", "not readable as JSON")


def test_missing_tensor(directory: Path):
    edit_weights(directory, lambda w: [w.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)])
    refusal(directory, str(directory), "lacks model.layers.{0-1}.mlp.up_proj.weight")


def test_surplus_tensor(directory: Path):
    edit_weights(directory, lambda w: w.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(8)}))
    refusal(directory, "surplus model.layers.1.self_attn.q_norm.weight in model.safetensors")


def test_wrong_shape_and_others_all_named(directory: Path):
    def change(w):
        w["model.norm.weight"] = torch.ones(31)
        w["extra"] = torch.ones(1)
        del w["model.embed_tokens.weight"]

    edit_weights(directory, change)
    refusal(
        directory,
        "model.norm.weight has shape [31] in model.safetensors, needs [32]",
        "surplus extra",
        "lacks model.embed_tokens.weight",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weight(directory: Path, value: float):
    edit_weights(directory, lambda w: w["model.layers.2.mlp.down_proj.weight"][0, :2].fill_(value))
    refusal(directory, "model.safetensors", "model.layers.2.mlp.down_proj.weight has 2 non-finite")


def test_overflow_of_the_wanted_dtype_is_not_silent(directory: Path):
    edit_weights(directory, lambda w: w["model.norm.weight"][:1].fill_(1e6))
    with pytest.raises(UserError, match=r"model\.norm\.weight has 1 non-finite of 32 values as float16"):
        hf.load(directory, torch.float16)
    with pytest.raises(UserError, match=r"model\.norm\.weight has 1 non-finite of 32 values as float16"):
        hf.save(hf.load(directory), directory / "half", torch.float16)


@pytest.mark.parametrize("keep", [0, 4, 500, 0.5, 0.999])
def test_truncated_file(directory: Path, keep: float):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refusal(directory, str(file), "truncated")


def test_unsupported_storage_type(directory: Path):
    edit_weights(directory, lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    refusal(directory, "model.safetensors", "model.norm.weight", "I8")


def test_sharded_directories(tmp_path: Path):
    hf.save(made(ModelConfig(**SMALL, **GQA)), tmp_path, max_shard_bytes=8_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    refusal(tmp_path, "model.safetensors.index.json", shards[1].name)
    weights = load_file(shards[0])
    gone = sorted(weights)[0]
    shards[1].write_bytes(kept)
    save_file({k: v for k, v in weights.items() if k != gone}, shards[0])
    refusal(tmp_path, shards[0].name, gone)
    save_file({**weights, "model.layers.0.stray": torch.ones(1)}, shards[0])
    refusal(tmp_path, shards[0].name, "model.layers.0.stray")
    save_file(weights, shards[0])
    save_file(weights, tmp_path / "model.safetensors")
    refusal(tmp_path, str(tmp_path), "both model.safetensors and model.safetensors.index.json")


def test_no_weights(directory: Path):
    (directory / "model.safetensors").unlink()
    refusal(directory, str(directory), "neither model.safetensors")


def test_rotary_buffers_of_old_checkpoints_are_ignored(directory: Path):
    edit_weights(directory, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    hf.load(directory)


def test_tied_head_spelled_out(directory: Path):
    edit_weights(directory, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    model = hf.load(directory)
    assert model.lm_head.weight is model.embed_tokens.weight
    edit_weights(directory, lambda w: w["lm_head.weight"][0, 0].add_(1))
    refusal(directory, "model.safetensors", "lm_head.weight", "tie_word_embeddings")


def test_copy_tokenizer(tmp_path: Path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        hf.copy_tokenizer(source, target)
    for name in ("tokenizer.json", "generation_config.json", "unrelated.txt"):
        (source / name).write_text("{}")
    assert hf.copy_tokenizer(source, target) == ["tokenizer.json", "generation_config.json"]
    assert sorted(p.name for p in target.iterdir()) == ["generation_config.json", "tokenizer.json"]


def test_loading_does_not_touch_the_global_random_state(directory: Path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    hf.load(directory)
    assert torch.equal(before, torch.get_rng_state())
