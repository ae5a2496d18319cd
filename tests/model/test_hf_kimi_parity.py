"""Kimi-Linear against transformers' own kimi_linear, in float32: their directories read here, ours read there.

Tiny random models in which no parameter is zero or one. Log-probs over the whole vocabulary, fresh and through a
SequenceState.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hf_edit import tensors

from nonet.model import SequenceState, hf
from nonet.model.hf_config import family_of
from nonet.model.hf_names import bare
from nonet.types import UserError

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no kimi_linear")

VOCAB = 97
LENGTHS = (1, 2, 17, 130)
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
    v_head_dim=16, q_lora_rank=None, num_experts=8, num_experts_per_token=3, num_shared_experts=1,
    routed_scaling_factor=2.446, first_k_dense_replace=1, model_max_length=4096, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
LINEAR: dict[str, Any] = dict(
    head_dim=8, num_heads=4, short_conv_kernel_size=4, kda_layers=[1, 2, 3, 5], full_attn_layers=[4]
)
OWN_SPELLING: dict[str, Any] = dict(
    linear_attn_config=None, first_k_dense_replace=None,
    linear_head_dim=16, linear_num_heads=4, linear_conv_kernel_dim=3,
    layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention", "full_attention"],
    mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "q_lora": dict(q_lora_rank=24),
    "two-dense-first": dict(first_k_dense_replace=2, num_shared_experts=2),
    "none-dense": dict(first_k_dense_replace=0),
    "all-dense": dict(first_k_dense_replace=5),
    "no-renormalise-scale-1": dict(moe_renormalize=False, routed_scaling_factor=1.0),
    "tied": dict(tie_word_embeddings=True),
    "transformers-spelling": OWN_SPELLING,
    "kda-only": dict(linear_attn_config={**LINEAR, "kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}),
    "mla-only": dict(linear_attn_config={**LINEAR, "kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}),
}


def reference(options: dict[str, Any], directory: Path, **saving: Any) -> Any:
    """A random transformers model, saved to `directory`."""
    fields = {**SIZES, "linear_attn_config": LINEAR, **options}
    absent = [k for k in ("linear_attn_config", "first_k_dense_replace") if fields[k] is None]
    config = transformers.KimiLinearConfig(**{k: v for k, v in fields.items() if k not in absent})
    model = transformers.KimiLinearForCausalLM(config).eval()
    noise = torch.Generator().manual_seed(len(str(options)))
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            drawn = torch.randn(p.shape, generator=noise)
            p.copy_(1 + 0.3 * drawn if "norm" in name else 0.4 * drawn if p.numel() < 200 else 0.12 * drawn)
        if config.tie_word_embeddings:
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(directory, **saving)
    return model


def prompts() -> list[torch.Tensor]:
    return [tiny.tokens(1, n, vocab=VOCAB, seed=n) for n in LENGTHS]


def cached_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Prefill most of the prompt, then one token at a time."""
    T = tokens.shape[1]
    head = max(1, T - 5)
    state = SequenceState.new(model.config, 1, T, torch.float32)
    hidden = [model(tokens[:, :head], state)] + [model(tokens[:, t : t + 1], state) for t in range(head, T)]
    return model.logits(torch.cat(hidden, 1))


@torch.no_grad()
def difference(theirs: Any, ours: Any, cached: bool = False) -> float:
    worst = 0.0
    for tokens in prompts():
        want = theirs(tokens, use_cache=False).logits.log_softmax(-1)
        got = cached_logits(ours, tokens) if cached else ours.logits(ours(tokens))
        worst = max(worst, float((got.log_softmax(-1) - want).abs().max()))
    return worst


def opened(directory: Path) -> tuple[Any, dict[str, Any]]:
    """A directory of ours in transformers, and what it says about the loading."""
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == "KimiLinearForCausalLM"
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return theirs.eval(), info


@pytest.mark.parametrize("name", VARIANTS)
def test_their_directory_here(name: str, tmp_path: Path):
    theirs = reference(VARIANTS[name], tmp_path)
    ours = hf.load(tmp_path).eval()
    # without any attention layer transformers runs only under use_cache = False, so we would not call it kimi_linear
    assert (family_of(ours.config) == "kimi_linear") == (name != "kda-only")
    fresh, cached = difference(theirs, ours), difference(theirs, ours, cached=True)
    print(f"{name}: max |log-prob difference| {fresh:.1e} fresh, {cached:.1e} cached")
    assert fresh < 1e-4
    assert cached < 1e-4


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "kda-only"])
def test_their_directory_through_ours_and_back(name: str, tmp_path: Path):
    """Read, written and read by transformers again: the same tensors under the same names, the same log-probs."""
    theirs = reference(VARIANTS[name], tmp_path / "in")
    hf.save(hf.load(tmp_path / "in"), tmp_path / "out", max_shard_bytes=40_000)
    # transformers writes a dense layer's mlp as block_sparse_moe; the published name is mlp, and it reads both
    want, got = {bare(n): t for n, t in tensors(tmp_path / "in").items()}, tensors(tmp_path / "out")
    assert {n: tuple(t.shape) for n, t in got.items()} == {n: tuple(t.shape) for n, t in want.items()}
    assert all(torch.equal(got[n], t) for n, t in want.items())
    again, info = opened(tmp_path / "out")
    assert not info["unexpected_keys"], info
    for tokens in prompts():
        with torch.no_grad():  # not to the bit: a loaded model multiplies its experts by another kernel
            torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_their_shards_here(tmp_path: Path):
    theirs = reference({}, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert difference(theirs, hf.load(tmp_path).eval()) < 1e-4


def test_a_head_of_its_own_beside_a_tied_config_is_refused(tmp_path: Path):
    """transformers' kimi_linear ignores tie_word_embeddings, so such a directory is not what it says."""
    theirs = reference(dict(tie_word_embeddings=True), tmp_path / "in")
    with torch.no_grad():
        theirs.lm_head.weight[0, 0] += 1
    theirs.save_pretrained(tmp_path / "in")
    with pytest.raises(UserError, match=r"lm_head\.weight differs .* tie_word_embeddings = true; set it to false"):
        hf.load(tmp_path / "in")
    raw = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    assert difference(theirs, hf.load(tmp_path / "in").eval()) < 1e-4


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"tie_embeddings": False},
        {"q_lora_rank": 12, "tie_embeddings": False},
        {"layers": 6, "moe": {**tiny.KIMI_LINEAR["moe"], "dense_layers": 3, "renormalise": False}},
        {"moe": None},
        {"norm_eps": 1e-6, "conv_kernel": 2},
    ],
    ids=str,
)
def test_our_directory_there(over: dict[str, Any], tmp_path: Path):
    ours = tiny.model("kimi_linear", vocab=VOCAB, **over)
    hf.save(ours, tmp_path, max_shard_bytes=30_000)
    theirs, info = opened(tmp_path)
    assert not info["unexpected_keys"], info
    assert difference(theirs, ours) < 1e-4


def test_our_backbone_there_beside_an_mtp_layer(tmp_path: Path):
    ours = tiny.model("kimi_linear", vocab=VOCAB, mtp_layers=1)
    hf.save(ours, tmp_path)
    assert hf.load(tmp_path).mtp is not None
    theirs, info = opened(tmp_path)
    assert info["unexpected_keys"] and all(".layers.4." in key for key in info["unexpected_keys"]), info
    assert difference(theirs, ours) < 1e-4


def test_reading_in_bfloat16(tmp_path: Path):
    reference({}, tmp_path)
    full, half = hf.load(tmp_path), hf.load(tmp_path, torch.bfloat16)
    for p, q in zip(full.parameters(), half.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q)
    assert torch.isfinite(half.logits(half(prompts()[2])).float()).all()
