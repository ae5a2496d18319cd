"""A GGUF file as the pieces of a Hugging Face directory: config and weights.

Owns: metadata -> ModelConfig, tensor names, dequantisation, and the row order of llama's rotary projections.
Invariant: `tensors` yields exactly the tensors the config describes, in float32, each as the file stores it.
Refuses, naming file and key: architectures, hyperparameters, tensors and storage types it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from nonet.model.attention import rope_frequencies
from nonet.model.config import ModelConfig, Rope
from nonet.model.hf import Entry, audit, checked
from nonet.types import UserError

ARCHITECTURES = ("llama", "qwen2", "qwen3")

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
READ = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.attn_factor": (1,),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
}
FREQUENCIES = "rope_freqs.weight"  # how Llama 3.1's rotary scaling is stored: one divisor per frequency


class GGUFFile:
    """An open GGUF file; nothing but the header is read until `tensors` is walked."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            self.reader = gguf.GGUFReader(str(self.path))
        except (OSError, ValueError, IndexError, KeyError) as e:
            raise UserError(f"{self.path}: truncated or not a GGUF file ({e}); copy it again") from e
        self.arch = str(self.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise UserError(
                f"{self.path}: general.architecture = {self.arch!r} is not implemented; "
                f"use one of {', '.join(ARCHITECTURES)}"
            )

    # -------------------------------------------------------------- metadata

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def _need(self, key: str) -> Any:
        value = self.get(f"{self.arch}.{key}")
        if value is None:
            raise UserError(f"{self.path}: metadata {self.arch}.{key} is missing; use a complete GGUF file")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        """A stored float32 as the shortest decimal that means it (1e-05, not 9.999999747378752e-06)."""
        value = self._need(key) if default is None else self.get(f"{self.arch}.{key}", default)
        return float(str(np.float32(value)))

    @cached_property
    def storage(self) -> dict[str, int]:
        """How many tensors are stored in each type, e.g. {"Q4_1": 210, "F32": 61, "Q8_0": 1}."""
        kinds = [t.tensor_type.name for t in self.reader.tensors]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    @cached_property
    def config(self) -> ModelConfig:
        self._refuse_unknown()
        layers, heads, d = (self._need(k) for k in ("block_count", "attention.head_count", "embedding_length"))
        head_dim = self.get(f"{self.arch}.attention.key_length", d // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self.get(f"{self.arch}.{key}", head_dim)) != head_dim:
                raise UserError(f"{self.path}: {self.arch}.{key} = {value} is not implemented; only {head_dim} is")
        names = {t.name for t in self.reader.tensors}
        return ModelConfig(
            vocab_size=int(self._shape("token_embd.weight")[0]),
            d_model=d,
            layers=layers,
            d_ff=self._need("feed_forward_length"),
            mixers=("gqa",) * layers,
            heads=heads,
            norm_eps=self._float("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in names,
            max_position=self._need("context_length"),
            activation="silu",
            mlp_bias="blk.0.ffn_up.bias" in names,
            kv_heads=self.get(f"{self.arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in names,
            o_bias="blk.0.attn_output.bias" in names,
            qk_norm="blk.0.attn_q_norm.weight" in names,
            rope=self._rope(head_dim),
        )

    def _refuse_unknown(self) -> None:
        prefix = f"{self.arch}."
        for key in (k for k in self.reader.fields if k.startswith(prefix)):
            short, value = key.removeprefix(prefix), self.get(key)
            if short in READ and not isinstance(value, list):
                continue
            if short not in NEUTRAL or value not in NEUTRAL[short]:
                raise UserError(f"{self.path}: metadata {key} = {value!r} is not implemented; use another model")

    def _rope(self, head_dim: int) -> Rope:
        theta, kind = self._float("rope.freq_base", 10000.0), self.get(f"{self.arch}.rope.scaling.type", "none")
        if FREQUENCIES in {t.name for t in self.reader.tensors}:
            return self._llama3_rope(theta, head_dim)
        if kind == "none":
            return Rope(theta=theta)
        if kind == "linear":
            return Rope(theta=theta, scaling="linear", factor=self._float("rope.scaling.factor"))
        raise UserError(
            f"{self.path}: metadata {self.arch}.rope.scaling.type = {kind!r} is not implemented; only none, linear are"
        )

    def _llama3_rope(self, theta: float, head_dim: int) -> Rope:
        """The settings whose divisors are those stored; Llama 3.1's own (1, 4, 8192) are the only ones tried."""
        stored = torch.from_numpy(np.array(self._array(FREQUENCIES)))
        rope = Rope(theta=theta, scaling="llama3", factor=float(stored.max()), original_max_position=8192)
        divisors = rope_frequencies(Rope(theta=theta), head_dim) / rope_frequencies(rope, head_dim)
        if stored.shape != divisors.shape or not torch.allclose(stored, divisors, rtol=1e-3):
            raise UserError(f"{self.path}: {FREQUENCIES} is not Llama 3.1's rotary scaling; use another model")
        return rope

    # --------------------------------------------------------------- weights

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, float32 tensor) one at a time, audited against the config first."""
        config = self.config
        stored = {self._hf_name(t.name): t.name for t in self.reader.tensors if t.name != FREQUENCIES}
        audit({hf: Entry(self.path, self._shape(name)) for hf, name in stored.items()}, config, self.path)
        for hf, name in stored.items():
            array = self._array(name)
            if self.arch == "llama" and ".self_attn.q_proj." in hf:
                array = unpermute(array, config.heads)
            elif self.arch == "llama" and ".self_attn.k_proj." in hf:
                array = unpermute(array, config.gqa_kv_heads)
            yield hf, checked(torch.from_numpy(np.array(array, dtype=np.float32)), name, self.path)

    def _hf_name(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        known = match and (BLOCK if match[1] else TOP).get(match[2])
        if not match or not known:
            raise UserError(f"{self.path}: tensor {name} is not implemented; use a plain {self.arch} model")
        return f"model.layers.{match[1]}.{known}.{match[3]}" if match[1] else f"{known}.{match[3]}"

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        found = next((t for t in self.reader.tensors if t.name == name), None)
        if found is None:
            raise UserError(f"{self.path}: tensor {name} is missing; use a complete GGUF file")
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        """Rows first; the file lists dimensions the other way round."""
        return tuple(int(n) for n in reversed(self._tensor(name).shape))

    def _array(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as e:
            kind = tensor.tensor_type.name
            raise UserError(f"{self.path}: {name} is stored as {kind}, which is not readable; use Q8_0 or F16") from e


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of rotary projections: pairs (2i, 2i+1) back to halves (i, i + head_dim/2).

    >>> unpermute(np.array([0, 2, 1, 3]), 1)
    array([0, 1, 2, 3])
    """
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
