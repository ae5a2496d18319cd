"""What a model costs: parameters, floating-point operations, bytes. Pure arithmetic on shapes, so a model on the meta
device answers as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from nonet.model.config import ModelConfig


@dataclass(frozen=True)
class Cost:
    """Counts of one model. `total` and `active` are without the MTP layer, as published sizes are; active leaves out
    the embedding (a lookup) and the routed experts a token does not visit.
    """

    config: ModelConfig
    total: int
    active: int
    mtp: int

    @staticmethod
    def of(config: ModelConfig, named: Iterable[tuple[str, Tensor]]) -> Cost:
        """named: the model's parameters, on any device."""
        moe = config.moe
        total = active = mtp = 0
        for name, p in named:
            if name.startswith("mtp."):
                mtp += p.numel()
                continue
            total += p.numel()
            if moe is not None and ".experts." in name and ".shared_experts." not in name:
                active += p.numel() // moe.experts * moe.top_k
            elif name != "embed_tokens.weight" or config.tie_embeddings:  # a tied embedding is also the head
                active += p.numel()
        return Cost(config, total, active, mtp)

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds times two of one token's forward, work over the context aside (see `attention_flops`)."""
        return 2 * self.active

    def attention_flops(self, context: int) -> int:
        """What one decoded token adds by looking at `context` earlier ones: absorbed MLA, GQA, and KDA's fixed step."""
        c = self.config
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        per_layer = {
            "gqa": 4 * c.heads * c.gqa_head_dim * context,
            "mla": 2 * c.heads * (latent + c.kv_lora_rank) * context,
            "kda": 7 * c.heads * c.kda_head_dim**2,
        }
        return sum(per_layer[m] for m in c.layer_mixers)

    def bytes_per_token(self, itemsize: int = 4) -> int:
        """What every further token adds to one sequence's state (KV pages and MLA latents)."""
        c = self.config
        per_layer = {
            "gqa": 2 * c.gqa_kv_heads * c.gqa_head_dim,
            "mla": c.kv_lora_rank + c.qk_rope_head_dim,
            "kda": 0,
        }
        return itemsize * sum(per_layer[m] for m in c.layer_mixers)

    def bytes_per_state(self, itemsize: int = 4) -> int:
        """One sequence's fixed-size state (KDA matrices and convolution tails)."""
        c = self.config
        matrix = c.heads * c.kda_head_dim**2
        tails = 3 * c.kda_width * (c.conv_kernel - 1)
        return itemsize * (matrix + tails) * c.layer_mixers.count("kda")

    @property
    def weight_bytes(self) -> int:
        """Of a checkpoint in bfloat16, quantised expert weights at their packed size (4 bits and a byte per 32)."""
        moe, c = self.config.moe, self.config
        packed = 0
        if moe is not None and c.quant is not None:
            layers = c.layers - moe.dense_layers
            packed = layers * moe.experts * 3 * moe.d_ff * c.expert_width
        return 2 * (self.total - packed) + packed // 2 + packed // 32
