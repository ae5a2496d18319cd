"""A GGUF of about 100 KB written by gguf.GGUFWriter: a random model, a small BPE vocabulary, a chat template.

The rows of llama's q and k projections are permuted here as llama.cpp's converter does it, spelled out row by row, so
that the reader's inverse is checked against something other than itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

from nonet.model import Model, ModelConfig, Rope
from nonet.model.init import initialise

Q = gguf.GGMLQuantizationType
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
PLAIN = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
PARTS = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
}


def vocabulary() -> list[str]:
    words = ["".join(m.split()) for m in MERGES]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *words, "<tool>", "[PAD0]"]


def config(arch: str, **fields: Any) -> ModelConfig:
    by_arch = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}[arch]
    base: dict[str, Any] = dict(vocab_size=len(vocabulary()), d_model=64, layers=2, d_ff=96, heads=4, kv_heads=2)
    base |= dict(head_dim=16, mixers=("gqa", "gqa"), activation="silu", rope=Rope(theta=5000.0), max_position=512)
    return ModelConfig(**{**base, **by_arch, **fields})


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i and i + half of each head become neighbours."""
    size = len(rows) // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def write(
    path: Path, arch: str = "llama", pre: str = "smollm", metadata: dict[str, Any] | None = None, **fields: Any
) -> dict[str, np.ndarray]:
    """Write the file; returns what its tensors should read as, by Hugging Face name. None in metadata drops a key."""
    c = config(arch, **fields)
    model = initialise(Model(c), 1)
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (header(c, arch, pre) | (metadata or {})).items():
        add(writer, key, value)
    truth: dict[str, np.ndarray] = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1
        value = (p.detach() + noise).numpy()
        kind = Q.F32 if value.ndim == 1 else (Q.Q8_0 if "embed" in name else (Q.Q4_1, Q.Q8_0, Q.F16)[i % 3])
        stem, _, leaf = name.rpartition(".")
        rotary = arch == "llama" and stem.endswith(("q_proj", "k_proj"))
        heads = c.heads if "q_proj" in stem else c.gqa_kv_heads
        stored = quantize(permuted(value, heads) if rotary else value, kind)
        block = stem.split(".", 2)
        theirs = f"blk.{block[1]}.{PARTS[block[2]]}" if block[0] == "layers" else PLAIN[stem]
        writer.add_tensor(f"{theirs}.{leaf}", stored, raw_dtype=kind)
        hf_name = name if stem == "lm_head" else f"model.{name}"
        truth[hf_name] = dequantize(quantize(value, kind), kind).astype(np.float32)
    if c.rope is not None and c.rope.scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(c.rope, c.gqa_head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


def header(c: ModelConfig, arch: str, pre: str) -> dict[str, Any]:
    tokens = vocabulary()
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 2) + [4, 5]
    dims = {"block_count": c.layers, "context_length": c.max_position, "embedding_length": c.d_model}
    dims |= {"feed_forward_length": c.d_ff, "attention.head_count": c.heads, "attention.head_count_kv": c.kv_heads}
    dims |= {"attention.layer_norm_rms_epsilon": np.float32(c.norm_eps), "rope.freq_base": np.float32(c.rope.theta)}
    dims |= {"attention.key_length": c.head_dim, "rope.dimension_count": c.head_dim, "vocab_size": c.vocab_size}
    ids = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    return {
        **{f"{arch}.{key}": value for key, value in dims.items()},
        **{f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, (float, np.floating)):
        writer.add_float32(key, float(value))
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def llama3_divisors(rope: Rope, head_dim: int) -> np.ndarray:
    """The rope_freqs tensor as llama.cpp's converter computes it."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope.theta ** (i / head_dim)
        low, high = (
            rope.original_max_position / rope.low_freq_factor,
            rope.original_max_position / rope.high_freq_factor,
        )
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(rope.factor)
        else:
            smooth = rope.original_max_position / wavelength - rope.low_freq_factor
            smooth /= rope.high_freq_factor - rope.low_freq_factor
            out.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(out, dtype=np.float32)
