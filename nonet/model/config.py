"""Every dimension of a model.

One config describes three families: plain decoders (`mixers` all "gqa", rotary positions), Kimi-Linear and K3 (mixers
"kda" and "mla", no positions; K3 adds attention residuals, gates and latent experts). Names follow the Hugging Face
configs they are read from. What a config costs is `model/cost.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nonet.config import Config
from nonet.quant import QuantConfig

Mixer = Literal["gqa", "kda", "mla"]


class Rope(Config):
    """Rotary positions; scaling "llama3" stretches low frequencies (Llama 3.1), "linear" divides all positions."""

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class MoEConfig(Config):
    """Routed experts (k3 section 1.5): sigmoid scores, the `top_k` best of score + bias, weights from scores alone."""

    experts: int = Field(gt=1)
    top_k: int = Field(gt=0)
    d_ff: int = Field(gt=0)  # width of one expert, routed or shared
    shared: int = Field(default=1, ge=0)  # always-on experts, fused into one of shared * d_ff
    latent: int = Field(default=0, ge=0)  # width of what routed experts read; 0: the model's own, no projections
    dense_layers: int = Field(default=1, ge=0)  # the first layers keep a dense feed-forward
    renormalise: bool = True
    scale: float = 1.0
    balance: Literal["quantile", "sign", "none"] = "quantile"  # how training moves the selection bias
    sign_step: float = Field(default=1e-3, gt=0)  # of balance = "sign" (DeepSeek-V3)

    @model_validator(mode="after")
    def _consistent(self) -> MoEConfig:
        if self.top_k >= self.experts:
            raise ValueError(f"top_k = {self.top_k} of {self.experts} experts: must be fewer, or nothing is chosen")
        return self


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
    attn_res_block: int = Field(default=0, ge=0)  # layers per attention-residual block; 0: ordinary residual
    # feed-forward: "silu" is SwiGLU; "situ" is K3's saturating gate, k3 section 1.5
    activation: Literal["silu", "situ"] = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    quant: QuantConfig | None = None  # of the routed experts; training sees the grid a checkpoint stores
    # gqa
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None
    # kda; conv_kernel = 1 is no convolution, decay "none" forgets nothing (both are probes of who carries positions)
    kda_head_dim: int = 32
    conv_kernel: int = Field(default=4, ge=1)
    decay: Literal["bounded", "softplus", "none"] = "bounded"  # K3's sigmoid, Kimi-Linear's softplus
    gate_lower_bound: float = Field(default=-5.0, ge=-5, lt=0)  # a chunk of 16 spans e^80, float32's reach
    decay_rank: int = 16
    gate_rank: int = Field(default=0, ge=0)  # of KDA's output gate; 0: a full matrix (K3)
    # mla (the qk_rope part is extra content width, rotated only under mla_rope, which no published model sets)
    q_lora_rank: int = Field(default=64, ge=0)  # 0: queries straight from the hidden state (Kimi-Linear)
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 8
    v_head_dim: int = 32
    mla_gate: bool = True
    mla_rope: Rope | None = None
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
        if "mla" in self.layer_mixers and self.qk_nope_head_dim + self.qk_rope_head_dim < 1:
            raise ValueError("qk_nope_head_dim and qk_rope_head_dim are both 0: queries need a width; set either")
        if self.mla_rope is not None and (self.qk_rope_head_dim < 2 or self.qk_rope_head_dim % 2):
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim}: mla_rope turns pairs, so it must be even")
        if self.mla_rope is not None and self.rope is not None and "gqa" in self.layer_mixers:
            raise ValueError("mla_rope and rope are both set: one model turns one kind of layer; drop one of them")
        if self.moe is not None and self.quant is not None and (self.expert_width % 32 or self.moe.d_ff % 32):
            raise ValueError(
                f"quant: experts of {self.expert_width} x {self.moe.d_ff} do not divide into blocks of 32; "
                "change moe.latent or moe.d_ff"
            )
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
    def rotary(self) -> tuple[Rope, int] | None:
        """The rotary positions in use and the width they turn; None where there are none."""
        if self.rope is not None and "gqa" in self.layer_mixers:
            return self.rope, self.gqa_head_dim
        return None if self.mla_rope is None else (self.mla_rope, self.qk_rope_head_dim)

    @property
    def kda_width(self) -> int:
        return self.heads * self.kda_head_dim

    @property
    def expert_width(self) -> int:
        """Width the routed experts read and write."""
        return (self.moe.latent if self.moe else 0) or self.d_model

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.dense_layers

    @property
    def taps(self) -> tuple[int, int, int]:
        """Layers (0-based) after which a draft reads its low, mid and high features (k3 section 3.1): the ends of the
        first, the middle and the last attention-residual block, or of thirds of a model without blocks.

        >>> ModelConfig(vocab_size=9, d_model=8, layers=93, d_ff=8, heads=1, attn_res_block=12).taps
        (11, 47, 92)
        """
        size = self.attn_res_block or max(1, self.layers // 3)
        blocks = -(-self.layers // size)
        return min(size, self.layers) - 1, min(size * ((blocks + 1) // 2), self.layers) - 1, self.layers - 1
