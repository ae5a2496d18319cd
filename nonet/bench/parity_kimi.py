"""Tiny random K3 and Kimi-Linear models against the two engines that know them: llama.cpp and transformers.

Owns: the models compared, and the largest differences of log-probs over the whole vocabulary. The models are written
by `hf.save` and read back, so what is compared is what a user's directory means to others. No parameter is left at one
or zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from nonet.bench.llamacpp import ask
from nonet.chat import Tokenizer
from nonet.chat.training import train
from nonet.convert.gguf_writer import export
from nonet.model import Model, ModelConfig, hf
from nonet.model.config import MoEConfig
from nonet.model.init import initialise
from nonet.quant import QuantConfig

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 150)
VOCAB = 300
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=64, layers=6, d_ff=96, heads=4, tie_embeddings=False, init_std=0.15, max_position=4096,
    kda_head_dim=16, decay_rank=16, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16,
)  # fmt: skip
K3: dict[str, Any] = dict(
    attn_res_block=2,
    moe=MoEConfig(experts=8, top_k=3, d_ff=64, shared=2, latent=32, scale=1.5),
    quant=QuantConfig(routed_expert_inputs="none"),  # MXFP4 weights; no engine compared here rounds inputs to MXFP8
)
KIMI_LINEAR: dict[str, Any] = dict(
    activation="silu", decay="softplus", gate_rank=16, q_lora_rank=0, mla_gate=False,
    moe=MoEConfig(experts=8, top_k=3, d_ff=48, shared=1, scale=2.0),
)  # fmt: skip


def k3_vs_llamacpp(seed: int = 0) -> dict[str, Any]:
    """Largest differences after prompts of LENGTHS, the last logits of each.

    k3_vs_llamacpp                 experts decoded (exactly) in the GGUF and rms_norm_eps = 1e-6, so that both sides do
                                   the same sums in float32
    k3_vs_llamacpp_eps_1e-5        K3's own rms_norm_eps: a GGUF has one epsilon, which llama.cpp also takes where the
                                   published code and our model have 1e-6
    k3_vs_llamacpp_packed(_median) experts kept in MXFP4: llama.cpp rounds their inputs to eight bits, as for every
                                   model; the routers of a random one turn that into other experts now and then
    """
    prompts = [ids.tolist() for ids in random_prompts(seed)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        same = written(ModelConfig(**SIZES, **K3, norm_eps=1e-6), folder / "same", seed)
        own = written(ModelConfig(**SIZES, **K3, norm_eps=1e-5), folder / "own", seed)
        exact, version = _against_llamacpp(same, folder / "same", prompts, unpack=True)
        epsilon, _ = _against_llamacpp(own, folder / "own", prompts, unpack=True)
        packed, _ = _against_llamacpp(same, folder / "same", prompts, unpack=False)
    return {
        "k3_vs_llamacpp": float(exact.max()),
        "k3_vs_llamacpp_eps_1e-5": float(epsilon.max()),
        "k3_vs_llamacpp_packed_median": float(packed.median()),
        "k3_vs_llamacpp_packed": float(packed.max()),
        "k3_prefix_lengths": list(LENGTHS),
        "k3_vocab": VOCAB,
        "versions": {"xllamacpp": version},
    }


@torch.no_grad()
def _against_llamacpp(model: Model, folder: Path, prompts: list[list[int]], unpack: bool) -> tuple[Tensor, str]:
    """[prompts] largest differences of log-probs after each prompt, and llama.cpp's version."""
    file = export(folder, folder.with_suffix(".gguf"), dtype="f32", unpack=unpack)
    answer = ask(file, VOCAB, prompts, neutral=Tokenizer(folder).encode("e")[0])
    last = [model.logits(model(torch.tensor([ids]))[:, -1])[0].log_softmax(-1) for ids in prompts]
    return (torch.stack(last) - torch.tensor(answer.log_probs)).abs().amax(-1), answer.version


def kimi_linear_vs_hf(seed: int = 0) -> dict[str, Any]:
    """Whole prompts of Kimi-Linear, at every position, against transformers' own class on the same directory."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as name:
        model = written(ModelConfig(**{**SIZES, **KIMI_LINEAR}), Path(name), seed)
        theirs = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        worst = 0.0
        for ids in random_prompts(seed):
            with torch.no_grad():
                want = theirs(ids[None]).logits[0].log_softmax(-1)
                ours = model.logits(model(ids[None]))[0].log_softmax(-1)
            worst = max(worst, float((ours - want).abs().max()))
        return {"kimi_linear_vs_hf": worst}


def written(config: ModelConfig, folder: Path, seed: int) -> Model:
    """A random model saved to `folder` with a tokenizer, and read back."""
    model = initialise(Model(config), seed)
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=noise) * 0.1)
    hf.save(model, folder)
    train(["the quick brown fox jumps over 12 lazy dogs " * 4], 280, folder)
    ends = json.loads((folder / "generation_config.json").read_text())
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | ends))
    return hf.load(folder).eval()


def random_prompts(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
