"""Our forward equals transformers' in float32, for every variant of every family we read.

Tiny random directories written by transformers itself; norm weights are not one and biases not zero, so that a
misplaced or ignored tensor shows. Log-probs over the whole vocabulary, fresh and through a SequenceState.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nonet.model import Model, ModelConfig, Rope, SequenceState, hf
from nonet.model.init import initialise

transformers = pytest.importorskip("transformers")

LENGTHS = (1, 2, 17, 128, 512)
CLOSE = 2e-5  # at 512 tokens either side is up to 1.5e-5 from float64, depending on the processor
SMALL = dict(vocab_size=211, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", dict(num_key_value_heads=2)),
    "llama-mha-tied": ("Llama", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-mqa-head_dim": ("Llama", dict(num_key_value_heads=1, head_dim=20)),
    "llama-biases": ("Llama", dict(num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
    "llama-attention_bias": ("Llama", dict(num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True)),
    "llama-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0))),
    "llama-llama3": (
        "Llama",
        dict(rope_parameters=dict(LLAMA3, rope_theta=50000.0, original_max_position_embeddings=64)),
    ),
    "qwen2": ("Qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2-untied-theta": (
        "Qwen2",
        dict(num_key_value_heads=4, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    ),
    "qwen3": ("Qwen3", dict(num_key_value_heads=2, head_dim=16)),
    "qwen3-wide-bias-tied": (
        "Qwen3",
        dict(num_key_value_heads=4, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    ),
}


def reference(family: str, options: dict, directory: Path, **saving):
    """A random transformers model, saved to `directory`."""
    config = getattr(transformers, f"{family}Config")(
        **{**SMALL, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, **options}
    )
    torch.manual_seed(len(str(options)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn_like(p)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 and p.mean() == 1 else 0.15 * noise)
    model.save_pretrained(directory, **saving)
    return model


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, SMALL["vocab_size"], (1, n), generator=generator) for n in LENGTHS]


def cached_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """Prefill most of the prompt, then one token at a time."""
    T = tokens.shape[1]
    head = max(1, T - 5)
    state = SequenceState.new(model.config, 1, T, torch.float32)
    hidden = [model(tokens[:, :head], state)] + [model(tokens[:, t : t + 1], state) for t in range(head, T)]
    return model.logits(torch.cat(hidden, 1))


@torch.no_grad()
def difference(theirs, ours, cached: bool = False) -> float:
    worst = 0.0
    for tokens in prompts():
        want = theirs(tokens).logits.log_softmax(-1)
        got = cached_logits(ours, tokens) if cached else ours.logits(ours(tokens))
        worst = max(worst, float((got.log_softmax(-1) - want).abs().max()))
    return worst


@pytest.mark.parametrize("name", VARIANTS)
def test_log_probs_equal_transformers(name: str, tmp_path: Path):
    theirs = reference(*VARIANTS[name], tmp_path)
    ours = hf.load(tmp_path)
    fresh, cached = difference(theirs, ours), difference(theirs, ours, cached=True)
    print(f"{name}: max |log-prob difference| {fresh:.1e} fresh, {cached:.1e} cached")
    assert fresh < CLOSE
    assert cached < CLOSE


def test_sharded_directory_loads_alike(tmp_path: Path):
    theirs = reference("Llama", {}, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert difference(theirs, hf.load(tmp_path)) < CLOSE


@pytest.mark.parametrize("name", ["llama-llama3", "llama-biases", "qwen2", "qwen3-wide-bias-tied"])
@pytest.mark.parametrize("shard", [5 * 10**9, 50_000])
def test_transformers_loads_what_we_save(name: str, shard: int, tmp_path: Path):
    reference(*VARIANTS[name], tmp_path / "in")
    ours = hf.load(tmp_path / "in")
    hf.save(ours, tmp_path / "out", max_shard_bytes=shard)
    assert hf.read_config(tmp_path / "out") == ours.config
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert difference(theirs.eval(), ours) < CLOSE


def test_older_spelling_of_rope(tmp_path: Path):
    """rope_theta and rope_scaling (transformers 4) mean what rope_parameters means."""
    reference(*VARIANTS["llama-llama3"], tmp_path)
    modern = hf.read_config(tmp_path)
    raw = hf.read_json(tmp_path / "config.json")
    raw["rope_scaling"] = raw.pop("rope_parameters")
    raw["rope_theta"] = raw["rope_scaling"].pop("rope_theta")
    hf.write_json(tmp_path / "config.json", raw)
    assert hf.read_config(tmp_path) == modern
    assert modern.rope is not None
    assert (modern.rope.theta, modern.rope.scaling) == (50000.0, "llama3")


def test_transformers_loads_the_backbone_beside_an_mtp_layer(tmp_path: Path):
    config = ModelConfig(
        vocab_size=211,
        d_model=48,
        layers=2,
        d_ff=64,
        heads=4,
        kv_heads=2,
        mixers=("gqa", "gqa"),
        activation="silu",
        rope=Rope(),
        mtp_layers=1,
    )
    ours = initialise(Model(config), 0)
    hf.save(ours, tmp_path)
    assert hf.load(tmp_path).mtp is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert difference(theirs, ours) < CLOSE
