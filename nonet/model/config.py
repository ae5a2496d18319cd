"""Every dimension of a model, and the cost arithmetic that follows from it.

One config describes both families: plain decoders (`mixers` all "gqa", rotary positions) and K3-shaped hybrids ("kda"
and "mla", no positions). Names follow the Hugging Face configs they are read from (k3: `kimi_linear`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nonet.config import Config

Mixer = Literal["gqa", "kda", "mla"]


class Rope(Config):
    """Rotary positions; scaling "llama3" stretches low frequencies (Llama 3.1), "linear" divides all positions."""

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def k3_mixers(layers: int) -> tuple[Mixer, ...]:
    """K3's order: MLA at every fourth layer and at the last, KDA elsewhere (93 layers: 69 KDA, 24 MLA).

    >>> k3_mixers(6)
    ('kda', 'kda', 'kda', 'mla', 'kda', 'mla')
    """
    return tuple("mla" if i % 4 == 3 or i == layers - 1 else "kda" for i in range(layers))


class ModelConfig(Config):
    vocab_size: int = Field(gt=0)
    d_model: int = Field(gt=0)
    layers: int = Field(gt=0)
    d_ff: int = Field(gt=0)
    mixers: tuple[Mixer, ...] = ()  # empty: k3_mixers(layers)
    heads: int = Field(gt=0)
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    init_std: float = 0.02
    max_position: int = 1 << 20
    # feed-forward: "silu" is SwiGLU; "situ" is K3's saturating gate, k3 section 1.5
    activation: Literal["silu", "situ"] = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    mlp_bias: bool = False
    # gqa
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None
    # kda
    kda_head_dim: int = 32
    conv_kernel: int = Field(default=4, ge=2)
    gate_lower_bound: float = Field(default=-5.0, ge=-5, lt=0)  # a chunk of 16 spans e^80, float32's reach
    decay_rank: int = 16
    # mla (the qk_rope part is extra content width, never rotated)
    q_lora_rank: int = 64
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 8
    v_head_dim: int = 32
    # multi-token prediction layers after the last
    mtp_layers: Literal[0, 1] = 0

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.mixers and len(self.mixers) != self.layers:
            raise ValueError(f"names {len(self.mixers)} mixers for {self.layers} layers")
        if self.heads % self.gqa_kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.gqa_kv_heads}")
        if "gqa" in self.layer_mixers and self.head_dim is None and self.d_model % self.heads:
            raise ValueError(f"d_model = {self.d_model} is not a multiple of heads = {self.heads}; set head_dim")
        if "gqa" in self.layer_mixers and self.rope is not None and self.gqa_head_dim % 2:
            raise ValueError(f"head_dim = {self.gqa_head_dim}: rotary positions turn pairs, so it must be even")
        return self

    @property
    def layer_mixers(self) -> tuple[Mixer, ...]:
        return self.mixers or k3_mixers(self.layers)

    @property
    def gqa_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def gqa_head_dim(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def kda_width(self) -> int:
        return self.heads * self.kda_head_dim

    # ------------------------------------------------------- cost arithmetic

    def cache_bytes_per_token(self, itemsize: int = 4) -> int:
        """Bytes every further token adds to one sequence's state (KV pages and MLA latents)."""
        per_layer = {
            "gqa": 2 * self.gqa_kv_heads * self.gqa_head_dim,
            "mla": self.kv_lora_rank + self.qk_rope_head_dim,
            "kda": 0,
        }
        return itemsize * sum(per_layer[m] for m in self.layer_mixers)

    def state_bytes(self, itemsize: int = 4) -> int:
        """Bytes of one sequence's fixed-size state (KDA matrices and convolution tails)."""
        matrix = self.heads * self.kda_head_dim**2
        tails = 3 * self.kda_width * (self.conv_kernel - 1)
        return itemsize * (matrix + tails) * self.layer_mixers.count("kda")
