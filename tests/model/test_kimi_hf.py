"""K3 and Kimi-Linear directories: names and shapes on disk in every spelling, and readable refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hf_edit import edit_weights, packed_model, refusal, same, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from nonet.model import hf
from nonet.types import UserError

KINDS = ["hybrid", "k3", "kimi_linear"]

# --------------------------------------------------------------- round trips


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_models_round_trip_bitwise(kind: str, tie: bool, shard: int, tmp_path: Path):
    model = tiny.model(kind, mtp_layers=1, tie_embeddings=tie)
    hf.save(model, tmp_path, max_shard_bytes=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == 10**9)
    back = hf.load(tmp_path).eval()
    assert back.config == model.config
    theirs = dict(back.named_parameters())
    assert list(theirs) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(p, theirs[name]), name
        assert theirs[name].requires_grad == p.requires_grad, name
    tokens = tiny.tokens(2, 20)
    hidden = model(tokens)
    assert torch.equal(hidden, back(tokens))
    assert torch.equal(model.mtp_logits(tokens, hidden), back.mtp_logits(tokens, hidden))


def test_names_and_shapes_of_k3(tmp_path: Path):
    """k3 section 1.1 and 3.2b."""
    model = packed_model(layers=7, tie_embeddings=False)
    hf.save(model, tmp_path)
    found = {name: tuple(t.shape) for name, t in tensors(tmp_path).items()}
    assert all(name.startswith("language_model.") for name in found)
    found = {name.removeprefix("language_model."): shape for name, shape in found.items()}
    attn, moe = "model.layers.1.self_attn.", "model.layers.1.block_sparse_moe."
    assert found[f"{attn}q_conv1d.weight"] == (32, 1, 4)
    assert found[f"{attn}A_log"] == (128,)
    assert found["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == (14, 32)
    assert found["model.layers.0.mlp.gate_proj.weight"] == (48, 32)
    assert found["model.layers.1.self_attention_res_proj.weight"] == (1, 32)
    assert found["model.layers.1.mlp_res_norm.weight"] == (32,) == found["model.output_attn_res_norm.weight"]
    assert found[f"{moe}gate.weight"] == (6, 32) and found[f"{moe}gate.e_score_correction_bias"] == (6,)
    assert found[f"{moe}experts.5.w1.weight_packed"] == (32, 32) and found[f"{moe}experts.5.w1.weight_scale"] == (32, 2)
    assert found[f"{moe}experts.0.w2.weight_packed"] == (64, 16) and found[f"{moe}experts.0.w2.weight_scale"] == (64, 1)
    assert found[f"{moe}shared_experts.up_proj.weight"] == (64, 32)
    assert found[f"{moe}routed_expert_down_proj.weight"] == (64, 32)
    assert found[f"{moe}routed_expert_norm.weight"] == (64,)
    mtp = {name.removeprefix("model.layers.7.") for name in found if name.startswith("model.layers.7.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < mtp
    assert {"input_layernorm.weight", "self_attn.q_a_proj.weight", "block_sparse_moe.gate.weight"} < mtp
    assert not any("_res_" in name or "mlp." in name for name in mtp)
    assert found == {k.removeprefix("language_model."): v for k, v in hf.expected(model.config).items()}
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert raw["text_config"]["linear_attn_config"]["full_attn_layers"] == [4, 7]
    nonet = raw["text_config"]["nonet"]
    assert nonet["quant"] == {"routed_expert_inputs": "mxfp8"}
    assert not {"moe", "mixers", "attn_res_block", "decay", "mla_gate"} & set(nonet)


def test_the_six_tensors_of_an_expert_lie_together():
    names = [name for name in hf.expected(packed_model().config) if ".experts." in name]
    for i in range(0, len(names), 6):
        assert len({name.split(".w")[0] for name in names[i : i + 6]}) == 1


def test_kimi_linear_is_named_as_published(tmp_path: Path):
    hf.save(tiny.model("kimi_linear", tie_embeddings=False), tmp_path)
    found = {name: tuple(t.shape) for name, t in tensors(tmp_path).items()}
    assert found["model.layers.0.self_attn.A_log"] == (1, 1, 4, 1)
    assert found["model.layers.1.block_sparse_moe.experts.5.w2.weight"] == (32, 12)
    assert found["model.layers.3.self_attn.q_proj.weight"] == (4 * 10, 32)
    assert found["model.layers.0.self_attn.g_a_proj.weight"] == (8, 32)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("kimi_linear", ["KimiLinearForCausalLM"])
    assert not {"attn_res_block_size", "mla_use_output_gate", "text_config"} & set(raw)


@pytest.mark.parametrize("kind", ["k3", "kimi_linear"])
def test_every_spelling_of_A_log_is_read(kind: str, tmp_path: Path):
    model = tiny.model(kind)
    hf.save(model, tmp_path)
    name = ("language_model." if kind == "k3" else "") + "model.layers.1.self_attn.A_log"
    want = model.layers[1].self_attn.A_log
    plain = want.detach()
    for spelling in (plain, plain.view(1, 1, 4, 1), torch.cat([plain, torch.zeros(124)])):
        edit_weights(tmp_path, lambda w, spelling=spelling: w.update({name: spelling.clone()}))
        assert torch.equal(hf.load(tmp_path).layers[1].self_attn.A_log, want)
    edit_weights(tmp_path, lambda w: w[name][100:].fill_(1))
    refusal(tmp_path, "model.safetensors", "model.layers.1.self_attn.A_log", "beyond its 4 heads")
    edit_weights(tmp_path, lambda w: w.update({name: torch.zeros(5)}))
    refusal(tmp_path, f"{name} has shape [5]")


def test_directories_written_before_the_nested_layout_are_read(tmp_path: Path):
    """K3's fields and tensors at the top, under model_type kimi_linear, without the prefix."""
    model = tiny.model("k3", mtp_layers=1)
    hf.save(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw["text_config"]))
    weights = tensors(tmp_path)
    flat = {name.removeprefix("language_model."): t for name, t in weights.items()}
    save_file(flat, tmp_path / "model.safetensors")
    back = hf.load(tmp_path)
    assert back.config == model.config
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), back.parameters(), strict=True))
    # whatever the spelling, `stored` gives what `save` would write
    same({**weights}, {name: t for name, t in sorted(hf.stored(tmp_path, back.config), key=lambda x: x[0])})


def test_a_name_with_and_without_prefix_is_ambiguous(tmp_path: Path):
    hf.save(tiny.model("k3"), tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"model.norm.weight": torch.ones(32)}))
    refusal(tmp_path, "language_model.model.norm.weight", " model.norm.weight", "which are the same; remove one")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_k3_keeps_in_float32_stays_so(dtype: torch.dtype, tmp_path: Path):
    model = tiny.model("k3")
    hf.save(model, tmp_path, dtype)
    wide = {name for name, t in tensors(tmp_path).items() if t.dtype == torch.float32}
    ends = ("A_log", "dt_bias", "e_score_correction_bias", "self_attn.o_norm.weight")
    assert wide == {name for name in hf.expected(model.config) if name.endswith(ends)}
    back = hf.load(tmp_path)
    assert torch.equal(
        back.layers[2].mlp.gate.e_score_correction_bias, model.layers[2].mlp.gate.e_score_correction_bias
    )
    assert {p.dtype for p in hf.load(tmp_path, dtype).parameters()} == {dtype}


# ------------------------------------------------------------------- refusals


@pytest.fixture
def k3(tmp_path: Path) -> Path:
    hf.save(packed_model(tie_embeddings=False), tmp_path)
    return tmp_path


def test_a_lost_shard_of_experts_stays_one_readable_sentence(k3: Path):
    gone = re.compile(r".*layers\.[345]\.block_sparse_moe\.experts\.[1-4]\..*")
    edit_weights(k3, lambda w: [w.pop(name) for name in list(w) if gone.fullmatch(name)])
    sentence = refusal(k3)
    assert (
        "lacks language_model.model.layers.{3-5}.block_sparse_moe.experts.{1-4}.{w1,w2,w3}."
        "{weight_packed,weight_scale}: correct config.json"
    ) in sentence
    assert len(sentence) < 300


def test_missing_surplus_and_wrong_tensors_of_experts(k3: Path):
    base = "language_model.model.layers.1.block_sparse_moe.experts."

    def change(w: dict[str, Tensor]) -> None:
        del w[f"{base}0.w1.weight_scale"]
        w[f"{base}6.w1.weight_packed"] = torch.zeros(32, 32, dtype=torch.uint8)
        w[f"{base}2.w2.weight_scale"] = torch.zeros(64, 2, dtype=torch.uint8)

    edit_weights(k3, change)
    refusal(
        k3,
        f"lacks {base}0.w1.weight_scale",
        f"has surplus {base}6.w1.weight_packed in model.safetensors",
        f"{base}2.w2.weight_scale has shape [64, 2] in model.safetensors, needs [64, 1]",
    )


def test_vision_tensors_are_surplus_because_only_the_text_model_is_implemented(k3: Path):
    parts = {f"vision_tower.encoder.blocks.{i}.wqkv.weight": torch.ones(2, 2) for i in range(27)}
    edit_weights(k3, lambda w: w.update({**parts, "mm_projector.proj.weight": torch.ones(2, 2)}))
    refusal(
        k3,
        "surplus vision tensors (27 under vision_tower.*, 1 under mm_projector.*, in model.safetensors)",
        "only the text model is implemented: remove these tensors",
    )


def test_packed_experts_of_another_type(k3: Path):
    name = "language_model.model.layers.2.block_sparse_moe.experts.1.w3.weight_scale"
    edit_weights(k3, lambda w: w.update({name: w[name].to(torch.int8)}))
    refusal(k3, "model.safetensors", name, "stored as I8", "mxfp4-pack-quantized stores U8")


def test_a_nan_scale_is_refused(k3: Path):
    name = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    edit_weights(k3, lambda w: w[f"language_model.{name}_scale"][3, 0].fill_(255))
    refusal(k3, str(k3), f"{name} has 32 non-finite of 2048 values")


def test_a_master_that_is_not_finite_is_not_written(tmp_path: Path):
    model = packed_model()
    with torch.no_grad():
        model.layers[1].mlp.experts.w1[3, 0, 0] = float("nan")
    with pytest.raises(UserError, match=r"experts\.3\.w1\.weight_packed has 1 non-finite of 2048 values as float32"):
        hf.save(model, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_copies_in_the_mtp_layer_must_be_the_models_own(k3: Path):
    at = "language_model.model.layers.6."
    embed, head = f"{at}embed_tokens.weight", f"{at}shared_head.head.weight"

    def spell_out(w: dict[str, Tensor]) -> None:
        w[embed] = w["language_model.model.embed_tokens.weight"].clone()
        w[head] = w["language_model.lm_head.weight"].clone()

    want = hf.load(k3)
    edit_weights(k3, spell_out)
    assert all(torch.equal(a, b) for a, b in zip(want.parameters(), hf.load(k3).parameters(), strict=True))
    edit_weights(k3, lambda w: w[head][0, 0].add_(1))
    refusal(k3, f"{head} differs from language_model.lm_head.weight", "MTP")
    edit_weights(k3, lambda w: [spell_out(w), w[embed][0, 0].add_(1)])
    refusal(k3, f"{embed} differs from language_model.model.embed_tokens.weight", "MTP")


def test_a_tied_kimi_linear_spells_its_head_out(tmp_path: Path):
    """transformers' kimi_linear never ties; a directory without the copy is ours to read all the same."""
    model = tiny.model("kimi_linear", tie_embeddings=True)
    hf.save(model, tmp_path)
    weights = tensors(tmp_path)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    back = hf.load(tmp_path)
    assert back.lm_head.weight is back.embed_tokens.weight
    same(weights, dict(sorted(hf.stored(tmp_path, back.config))))
    edit_weights(tmp_path, lambda w: w.pop("lm_head.weight"))
    assert torch.equal(hf.load(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    same(weights, dict(sorted(hf.stored(tmp_path, back.config))))
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": weights["lm_head.weight"] + 1}))
    refusal(tmp_path, "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings")


def test_one_shard_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hf.save(packed_model(), tmp_path, max_shard_bytes=30_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    opened, now, most = hf.open_shard, 0, 0

    class Counted:
        def __init__(self, file: Path):
            self.inner = opened(file)

        def __enter__(self) -> Any:
            nonlocal now, most
            now += 1
            most = max(most, now)
            return self.inner.__enter__()

        def __exit__(self, *args: Any) -> None:
            nonlocal now
            now -= 1
            self.inner.__exit__(*args)

    monkeypatch.setattr(hf, "open_shard", Counted)
    hf.load(tmp_path)
    assert most == 1


def test_files_hold_what_was_asked_for(tmp_path: Path):
    """Shards of a packed model: none above the bound unless one tensor alone is, and every tensor in one of them."""
    model = packed_model()
    hf.save(model, tmp_path, max_shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(index) == sorted(hf.expected(model.config))
    for file in tmp_path.glob("*.safetensors"):
        sizes = [t.numel() * t.element_size() for t in load_file(file).values()]
        assert sum(sizes) <= 30_000 or len(sizes) == 1
