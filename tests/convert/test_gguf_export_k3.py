"""K3 directories as GGUF: every value where llama.cpp looks for it, and llama.cpp's log-probs from it.

The judge is tests/k3_oracle.py, a float64 forward that shares nothing with the exporter or the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_k3
import torch
from gguf.quants import dequantize
from k3_oracle import Oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

from nonet.bench import llamacpp
from nonet.convert.gguf_writer import export
from nonet.types import UserError

# Of log-probs over the whole vocabulary: float32 rounding, over six layers and up to 150 tokens.
CLOSE = 1e-4
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 150)


def read(file: Path) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(str(file)).tensors}


def fields(file: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(str(file))
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_k3.write(tmp_path_factory.mktemp("k3") / "model")


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    return export(source, source.parent / "k3.gguf")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, tiny_k3.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


# ------------------------------------------------------------------- the file


def test_metadata(written: Path):
    found = {k.removeprefix("kimi-k3."): v for k, v in fields(written).items() if k.startswith("kimi-k3.")}
    assert fields(written)["general.architecture"] == "kimi-k3"
    assert found.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert found == {
        "block_count": 6, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96,
        "vocab_size": tiny_k3.VOCAB + 3, "attention.head_count": 4, "attention.head_count_kv": [0, 0, 1, 0, 0, 1],
        "attention.key_length": 40, "attention.value_length": 32, "attention.key_length_mla": 24,
        "attention.value_length_mla": 16, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 32,
        "rope.dimension_count": 8, "ssm.conv_kernel": 4, "kda.head_dim": 16, "kda.gate_lower_bound": -5.0,
        "attn_res.block_size": 2, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0,
        "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64,
        "expert_shared_count": 2, "expert_latent_length": 32, "expert_weights_scale": 1.5,
        "expert_weights_norm": True, "expert_gating_func": 2,
    }  # fmt: skip


def test_values_are_where_llama_cpp_looks(source: Path, written: Path):
    ours, theirs = load_file(source / "model.safetensors"), read(written)
    at = "model.layers.0.self_attn."
    assert np.array_equal(theirs["token_embd.weight"], ours["model.embed_tokens.weight"].numpy())
    assert np.array_equal(theirs["blk.0.ssm_a"], -torch.exp(ours[f"{at}A_log"]).numpy())
    assert np.array_equal(theirs["blk.0.ssm_dt.bias"], ours[f"{at}dt_bias"].numpy())
    assert np.array_equal(
        theirs["blk.0.ssm_conv1d_k.weight"].reshape(64, 4), ours[f"{at}k_conv1d.weight"][:, 0].numpy()
    )
    score = ours["model.layers.4.mlp_res_norm.weight"] * ours["model.layers.4.mlp_res_proj.weight"][0]
    assert np.array_equal(theirs["blk.4.ffn_res_score.weight"], score.numpy())
    kv_b = ours["model.layers.2.self_attn.kv_b_proj.weight"].numpy()
    for head in range(4):
        rows = kv_b[head * 32 : (head + 1) * 32]
        assert np.array_equal(theirs["blk.2.attn_k_b.weight"][head], rows[:16].T)
        assert np.array_equal(theirs["blk.2.attn_v_b.weight"][head], rows[16:])
    bias = ours["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].numpy()
    assert np.array_equal(theirs["blk.1.exp_probs_b.bias"], bias)


def test_packed_experts_are_the_same_numbers(source: Path, written: Path):
    oracle, theirs = Oracle(source), read(written)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(str(written)).tensors}
    for layer in (1, 5):
        for part, name in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            tensor = f"blk.{layer}.ffn_{name}_exps.weight"
            assert kinds[tensor] == "MXFP4"
            for e in range(8):
                want = oracle.weight(f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}")
                assert np.array_equal(theirs[tensor][e], want.numpy()), (tensor, e)
    assert fields(written)["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_unpacked_experts_are_the_same_numbers(dtype: str, source: Path, written: Path, tmp_path: Path):
    unpacked = read(export(source, tmp_path / "k3.gguf", dtype=dtype, unpack=True))
    for name, values in read(written).items():
        if "_exps" in name:
            assert np.array_equal(unpacked[name], values), name


def test_router_convolutions_and_vectors_stay_float32(source: Path, tmp_path: Path):
    file = export(source, tmp_path / "k3.gguf", dtype="bf16")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(str(file)).tensors}
    plain = {"attn_q", "attn_output", "ffn_gate_shexp", "ffn_routed_down", "attn_k_b", "token_embd", "output", "ssm_g"}
    for name, kind in kinds.items():
        part = name.removesuffix(".weight").split(".")[-1]
        wanted = "MXFP4" if "_exps" in name else "BF16" if part in plain else None
        assert wanted is None or kind == wanted, name
        if part in {"ffn_gate_inp", "ssm_conv1d_q", "ssm_a", "bias", "attn_norm", "attn_res_score", "ssm_norm"}:
            assert kind == "F32", name


def test_prefix_of_a_checkpoint_with_vision(source: Path, written: Path, tmp_path: Path):
    """The released layout: config nested, text tensors prefixed, A_log filled up with zeros, a tower beside."""
    other = tiny_k3.write(tmp_path / "model", prefix="language_model.")
    file = other / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("A_log")]:
        tensors[name] = torch.cat([tensors[name], torch.zeros(124)])
    save_file({**tensors, "vision_tower.patch_embed.weight": torch.ones(3, 3)}, file)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": config}))
    with pytest.raises(UserError, match=r"the vision tower .* leave it out on purpose with --drop vision"):
        export(other, tmp_path / "out.gguf")
    got, want = read(export(other, tmp_path / "out.gguf", drop=["vision"])), read(written)
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_act": "silu"}, "hidden_act = 'silu' has no place in GGUF's kimi-k3; only 'situ' has"),
        ({"mla_use_nope": False}, "mla_use_nope = False"),
        ({"linear_attn_config__use_full_rank_gate": False}, "linear_attn_config.use_full_rank_gate = False"),
        ({"linear_attn_config__num_heads": 8}, "linear_attn_config.num_heads = 8 differs"),
        ({"linear_attn_config__kda_layers": [1, 2]}, "must name each of the layers 1 to 6 once"),
        ({"linear_attn_config__short_conv_kernel_size": 1}, "short_conv_kernel_size = 1: must be an integer of at"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling = {'type': 'yarn'}"),
        ({"num_expert_group": 4}, "num_expert_group = 4"),
        ({"hidden_size": 128}, "needs ["),
        ({"hidden_size": None}, "hidden_size = None: must be an integer"),
        ({"nonet": {"decay": "none"}}, "nonet.decay = 'none' has no place"),
        ({"quantization_config": None}, "quantization_config is missing although"),
        ({"num_hidden_layers": 7, "linear_attn_config__kda_layers": [1, 2, 4, 5, 7]}, "lack model.layers.6."),
        ({"first_k_dense_replace": 2}, "lack model.layers.1.mlp.gate_proj.weight"),
        ({"latent_moe_use_norm": False}, "tensors have no place in this architecture"),
    ],
)
def test_what_kimi_k3_cannot_say(changes: dict, part: str, source: Path, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = tiny_k3.config(**changes)
    config.setdefault("quantization_config", tiny_k3.quantization_config())
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(UserError) as caught:
        export(folder, tmp_path / "out.gguf")
    assert part in str(caught.value)


def changed(source: Path, folder: Path, **tensors: torch.Tensor | None) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    now = load_file(folder / "model.safetensors") | {k.replace("__", "."): v for k, v in tensors.items()}
    save_file({k: v for k, v in now.items() if v is not None}, folder / "model.safetensors")
    return folder


EXPERT = "model__layers__1__block_sparse_moe__experts__3__w1__weight"


def test_bad_tensors(source: Path, tmp_path: Path):
    nan_scale = torch.full((64, 1), 255, dtype=torch.uint8)
    cases = {
        "4 heads": {"model__layers__0__self_attn__A_log": torch.ones(128)},
        "block whose scale is NaN": {f"{EXPERT}_scale": nan_scale},
        "packed in 7 of 8": {f"{EXPERT}_packed": None, f"{EXPERT}_scale": None, EXPERT: torch.ones(64, 32)},
        "the multi-token prediction layer": {"model__layers__6__enorm__weight": torch.ones(64)},
        "non-finite": {"model__norm__weight": torch.full((64,), float("nan"))},
    }
    for i, (part, tensors) in enumerate(cases.items()):
        with pytest.raises(UserError) as caught:
            export(changed(source, tmp_path / str(i), **tensors), tmp_path / "out.gguf")
        assert part in str(caught.value)


def test_a_bottleneck_wider_than_a_head(tmp_path: Path):
    with pytest.raises(UserError, match=r"bottleneck \(f_a_proj\) has 17 channels"):
        export(tiny_k3.write(tmp_path / "model", rank=17), tmp_path / "out.gguf")


# ------------------------------------------------------------------- llama.cpp


def differences(source: Path, oracles: Sequence[Oracle], folder: Path, **options: Any) -> Tensor:
    """[oracles, prompts]: largest difference of log-probs over the vocabulary, after every one of 16 prompts."""
    if not (llamacpp.ROOT / ".peers" / "llamacpp" / "bin" / "python").exists():
        pytest.skip("needs .peers/llamacpp; run `make peers`")
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    file = export(source, folder / "out.gguf", **options)
    answer = llamacpp.ask(file, vocab, prompts(), neutral=40)
    theirs_PW = torch.tensor(answer.log_probs)
    ours_OPW = torch.stack([torch.stack([oracle.log_probs(ids)[-1] for ids in prompts()]) for oracle in oracles])
    return (ours_OPW - theirs_PW).abs().amax(-1)


VARIANTS: dict[str, dict[str, Any]] = {
    "k3": {},
    "dense": {"num_experts": 0},
    "ordinary residual": {"attn_res_block_size": 0},
    "narrow bottleneck": {"rank": 5},
    "softplus decay": {"linear_attn_config__gate_lower_bound": None},
    "queries without a bottleneck, no gate": {"q_lora_rank": None, "mla_use_output_gate": False},
    "experts at full width": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "no norm, no shared experts": {"latent_moe_use_norm": False, "num_shared_experts": 0},
    "weights as they are": {"moe_renormalize": False, "routed_scaling_factor": 1.0},
    "tied": {"tie_word_embeddings": True},
    "blocks of four, two dense layers": {"attn_res_block_size": 4, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path):
    source = tiny_k3.write(tmp_path / "model", **VARIANTS[name])
    oracles = [Oracle(source, llamacpp=True), Oracle(source)]
    found, published = differences(source, oracles, tmp_path, dtype="f32", unpack=True).amax(-1).tolist()
    print(f"{name}: {found:.1e}; {published:.1e} with the epsilons of the published code")
    assert found < CLOSE
    assert published < 1e-3


def test_llama_cpp_on_packed_experts(source: Path, tmp_path: Path):
    """Its kernels put the inputs of MXFP4 products on an eight-bit grid, which shows; an oracle that does the same
    agrees after most prompts. (Not after all: an input halfway between two grid points may fall either way.)
    """
    oracles = [Oracle(source, llamacpp=True), Oracle(source, llamacpp=True, q8_inputs=True)]
    exact, same = differences(source, oracles, tmp_path)
    print(
        f"packed: median {exact.median():.1e}, most {exact.max():.1e}; with input rounding median {same.median():.1e}"
    )
    assert (exact > CLOSE).all()
    assert (same < CLOSE).sum() >= 8


def test_llama_cpp_makes_the_same_ids(tmp_path: Path):
    if not (llamacpp.ROOT / ".peers" / "llamacpp" / "bin" / "python").exists():
        pytest.skip("needs .peers/llamacpp; run `make peers`")
    from nonet.chat import Tokenizer
    from nonet.chat.training import train

    source = tiny_k3.write(tmp_path / "model", vocab_size=600)
    texts = ["move 12 boxes to b7, sort(abc) 345678 times\n", "Héllo  你好 🙂 x2=10**3", "a<|end|>b<tool>c 1٣²½ é"]
    train(texts * 50, 400, source, phrases=["<tool>"])
    answer = llamacpp.ask(export(source, tmp_path / "out.gguf"), 600, texts=texts)
    assert answer.ids == [Tokenizer(source).encode(text) for text in texts]
