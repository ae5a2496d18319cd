"""Llama, Qwen2 and Qwen3 directories as GGUF: what gguf_reader.py reads, written.

Owns: metadata keys and tensor names of these three architectures, and the row order of llama's rotary projections.
Invariant: GGUFFile reads back the same config, and the same tensors where the type holds them.
Refuses: models of these families that llama.cpp has no room for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.convert.gguf_plan import Builder, Item, Kind, Options, Plan
from nonet.convert.gguf_reader import BLOCK, FREQUENCIES, TOP
from nonet.convert.weights import Weights
from nonet.model import hf
from nonet.model.attention import rope_frequencies
from nonet.model.config import ModelConfig, Rope
from nonet.model.hf_config import family_of
from nonet.types import UserError

OURS = {**{v: k for k, v in TOP.items()}, **{v: k for k, v in BLOCK.items()}}
RECOMPUTED = ".rotary_emb.inv_freq"  # a buffer of old transformers versions; rope.freq_base says the same


def plan(weights: Weights, options: Options) -> Plan:
    """The file of a llama, qwen2 or qwen3 directory."""
    config = hf.read_config(weights.directory)
    family = family_of(config)
    _refuse(config, family, weights)
    builder = Builder(weights, options)
    for name, shape in hf.expected(config.model_copy(update={"mtp_layers": 0})).items():
        add(builder, config, family, name, shape)
    builder.leave(name for name in weights if name.endswith(RECOMPUTED))
    if config.tie_embeddings and "lm_head.weight" in weights:
        _leave_tied(builder)
    items = builder.finish(config.layers)
    if config.rope is not None and config.rope.scaling == "llama3":
        items.append(divisors(config.rope, config.gqa_head_dim))
    return Plan(family, {f"{family}.{key}": value for key, value in metadata(config).items()}, items)


def _refuse(config: ModelConfig, family: str, weights: Weights) -> None:
    file = weights.directory / "config.json"
    if family not in ("llama", "qwen2", "qwen3"):
        raise UserError(f"{file}: no GGUF architecture has this model's layers; export a llama, qwen or kimi-k3 model")
    if family != "llama" and config.rope is not None and config.rope.scaling == "llama3":
        raise UserError(f"{file}: rope_scaling llama3 has no place in GGUF's {family}; only in llama")
    if family == "qwen3" and (config.qkv_bias or config.o_bias):
        raise UserError(f"{file}: attention_bias = true has no place in GGUF's qwen3; only false has")


def metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys gguf_reader reads, without the architecture before them."""
    rope = config.rope or Rope()
    out: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.max_position,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.gqa_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.gqa_head_dim,
        "attention.value_length": config.gqa_head_dim,
        "rope.dimension_count": config.gqa_head_dim,
        "rope.freq_base": rope.theta,
    }
    if rope.scaling == "linear":
        out |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    return out


def add(builder: Builder, config: ModelConfig, family: str, name: str, shape: tuple[int, ...]) -> None:
    """One tensor under its GGUF name; llama's q and k rows in llama.cpp's order."""
    stem, _, leaf = name.rpartition(".")
    head, _, tail = stem.removeprefix("model.layers.").partition(".")
    theirs = f"blk.{head}.{OURS[tail]}" if stem.startswith("model.layers.") else OURS[stem]
    rotary = {"self_attn.q_proj": config.heads, "self_attn.k_proj": config.gqa_kv_heads}
    heads = rotary.get(tail) if family == "llama" else None
    builder.add(f"{theirs}.{leaf}", name, shape, None if heads is None else lambda t, h=heads: permute(t, h))


def permute(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp's row order of rotary projections: halves (i, i + head_dim/2) become neighbours (2i, 2i+1).

    >>> permute(torch.tensor([0, 1, 2, 3]), 1)
    tensor([0, 2, 1, 3])
    """
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def divisors(rope: Rope, head_dim: int) -> Item:
    """Llama 3.1's rotary scaling as GGUF stores it: one divisor per frequency."""
    plain, scaled = (rope_frequencies(r, head_dim) for r in (Rope(theta=rope.theta), rope))
    values = (plain / scaled).numpy().astype(np.float32)
    return Item(FREQUENCIES, values.shape, Kind.F32, lambda: values)


def _leave_tied(builder: Builder) -> None:
    """A tied model may still spell out its head; the file then needs only the embedding, if they are the same."""
    w = builder.weights
    if not torch.equal(w.read("lm_head.weight"), w.read("model.embed_tokens.weight")):
        raise UserError(
            f"{w.entry('lm_head.weight').file}: lm_head.weight differs from model.embed_tokens.weight although "
            "config.json says tie_word_embeddings = true; set it to false"
        )
    builder.leave(["lm_head.weight"])
