"""The two softmax mixers: grouped-query attention with rotary positions, and K3's gated MLA without positions.

Both take a `Span` (model/span.py). With no state a call is fresh and causal; right padding is then invisible to real
positions, and packed documents are invisible to each other, but for what the sequences of a tree share.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nonet.model.config import ModelConfig, Rope
from nonet.model.ffn import RMSNorm
from nonet.model.span import Span

_FEW = 8  # queries per row below which plain products beat the fused kernel (6x at one query on CPU, docs/log.md)
_MANY = 32  # queries per row from which materialising MLA's keys and values costs less than attending in latent space


def attend(q_BHTK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor, span: Span, scale: float) -> Tensor:
    """softmax(q k^T * scale) v with grouped keys; causal if the span is fresh, masked otherwise."""
    if span.unrolled is not None and span.unrolled.add(k_BHLK, v_BHLV) > 1:
        return span.unrolled.attend(q_BHTK, scale)
    if span.tree is not None:
        return span.tree.attend(q_BHTK[0], k_BHLK[0], v_BHLV[0], scale).unsqueeze(0)
    if span.documents is not None:
        parts = [
            attend(q_BHTK[:, :, a:b], k_BHLK[:, :, a:b], v_BHLV[:, :, a:b], Span.fresh(), scale)
            for a, b in span.documents.ranges
        ]
        return torch.cat(parts, 2)
    if span.mask_B1TL is not None and q_BHTK.shape[2] <= _FEW:
        return attend_plain(q_BHTK, k_BHLK, v_BHLV, span.mask_B1TL, scale)
    return F.scaled_dot_product_attention(
        q_BHTK,
        k_BHLK,
        v_BHLV,
        attn_mask=span.mask_B1TL,
        is_causal=span.mask_B1TL is None and q_BHTK.shape[2] > 1,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] != k_BHLK.shape[1],
    )


def attend_plain(q_BHTK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor, mask_B1TL: Tensor, scale: float) -> Tensor:
    """The definition, written out: the twin of the fused kernel and the faster of the two for a few queries."""
    B, H, T, K = q_BHTK.shape
    groups = k_BHLK.shape[1]
    q = (q_BHTK * scale).reshape(B, groups, H // groups * T, K)
    scores = (q @ k_BHLK.transpose(-1, -2)).view(B, groups, H // groups, T, -1)
    weights = scores.masked_fill_(~mask_B1TL.unsqueeze(1), float("-inf")).softmax(-1)
    return (weights.view(B, groups, H // groups * T, -1) @ v_BHLV).view(B, H, T, -1)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Inverse wavelengths [head_dim / 2], scaled as the checkpoint says (Llama 3.1's piecewise rule or linear).

    float32, operation by operation as published: log-probs then equal transformers' to the last bits.
    """
    inv = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "linear":
        inv = inv / rope.factor
    elif rope.scaling == "llama3":
        turns = rope.original_max_position / (2 * math.pi / inv)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        inv = (1 - smooth) * inv / rope.factor + smooth * inv
    return inv


@torch.inference_mode(False)
def rope_table(rope: Rope, head_dim: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [length, head_dim] for `rotate`, in the dtype and on the device of `like`.

    float32 angles, as every published implementation of these models computes them.
    """
    angles = torch.arange(length).float()[:, None] * rope_frequencies(rope, head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(like), torch.cat([-sin, sin], -1).to(like)


class Rotation:
    """cos and signed sin of positions: rows of a table that grows with the longest seen, two gathers where a sine would
    cost ten times that.
    """

    def __init__(self, config: ModelConfig):
        self._turned = config.rotary
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions_BT: Tensor, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """[B, T, 1, K] each, in the dtype and on the device of `like`; None in a model without rotary positions."""
        if self._turned is None:
            return None
        length, table = int(positions_BT.max()) + 1, self._table
        alike = table is not None and (table[0].device, table[0].dtype) == (like.device, like.dtype)
        if table is None or not alike or len(table[0]) < length:
            self._table = table = rope_table(*self._turned, max(256, 2 * length), like)
        return table[0][positions_BT].unsqueeze(2), table[1][positions_BT].unsqueeze(2)


class GQA(nn.Module):
    """Grouped-query attention with rotary positions (Llama), optional biases (Qwen2) and q/k norms (Qwen3)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.gqa_kv_heads, config.gqa_head_dim
        d, bias = config.d_model, config.qkv_bias
        self.q_proj = nn.Linear(d, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(d, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(d, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, d, bias=config.o_bias)
        self.q_norm = RMSNorm(self.dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.rope = config.rope

    def forward(self, x_BTD: Tensor, span: Span, state: dict | None) -> Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_norm(self.q_proj(x_BTD).view(B, T, self.heads, self.dim))
        k = self.k_norm(self.k_proj(x_BTD).view(B, T, self.kv_heads, self.dim))
        v = self.v_proj(x_BTD).view(B, T, self.kv_heads, self.dim)
        if span.rotation is not None:
            q, k = rotate(q, *span.rotation), rotate(k, *span.rotation)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if state is not None:
            k, v = cached(state["k"], k, span), cached(state["v"], v, span)
        o = attend(q.transpose(1, 2), k, v, span, self.dim**-0.5)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1))


class MLA(nn.Module):
    """Gated multi-head latent attention without positions (k3 section 1.3); ungated with plain queries in Kimi-Linear.

    Expanded (keys and values of every head materialised) for prompts; absorbed (queries projected into the latent
    space, so the cache stays one latent per position) where a few positions extend a state. Both are the same map.
    """

    NORM_EPS = 1e-6  # of the two latent norms, whatever rms_norm_eps says: K3's and Kimi-Linear's public code agree

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.heads, self.rank, self.extra = c.heads, c.kv_lora_rank, c.qk_rope_head_dim
        self.nope, self.v_dim = c.qk_nope_head_dim, c.v_head_dim
        queries = c.heads * (self.nope + self.extra)
        if c.q_lora_rank:
            self.q_a_proj = nn.Linear(c.d_model, c.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, self.NORM_EPS)
            self.q_b_proj = nn.Linear(c.q_lora_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(c.d_model, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.d_model, self.rank + self.extra, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, self.NORM_EPS)
        self.kv_b_proj = nn.Linear(self.rank, c.heads * (self.nope + self.v_dim), bias=False)
        self.gated = c.mla_gate
        if self.gated:
            self.g_proj = nn.Linear(c.d_model, c.heads * self.v_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * self.v_dim, c.d_model, bias=False)
        self.direct = c.q_lora_rank == 0
        self.rotated = c.mla_rope is not None
        self.scale = (self.nope + self.extra) ** -0.5

    def forward(self, x_BTD: Tensor, span: Span, state: dict | None) -> Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD) if self.direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_BTHK = q.view(B, T, self.heads, -1)
        latent, extra = self.kv_a_proj_with_mqa(x_BTD).split([self.rank, self.extra], -1)
        if self.rotated:
            q_BTHK, extra = self._rotated(q_BTHK, extra, span)
        latent_BTR = torch.cat([self.kv_a_layernorm(latent), extra], -1)
        if state is not None:
            latent_BTR = cached(state["latent"].unsqueeze(1), latent_BTR.unsqueeze(1), span).squeeze(1)
        attended = self._expanded if span.mask_B1TL is None or T >= _MANY else self._absorbed
        o = attended(q_BTHK.transpose(1, 2), latent_BTR, span).transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(torch.sigmoid(self.g_proj(x_BTD)) * o if self.gated else o)

    def _rotated(self, q_BTHK: Tensor, extra_BTE: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Rotary positions on the qk_rope parts: the variant that NoPE is compared with."""
        assert span.rotation is not None
        content, turned = q_BTHK.split([self.nope, self.extra], -1)
        q_BTHK = torch.cat([content, rotate(turned, *span.rotation)], -1)
        return q_BTHK, rotate(extra_BTE.unsqueeze(2), *span.rotation).squeeze(2)

    def _expanded(self, q_BHTK: Tensor, latent_BLR: Tensor, span: Span) -> Tensor:
        B, L, _ = latent_BLR.shape
        content, extra = latent_BLR.split([self.rank, self.extra], -1)
        kv = self.kv_b_proj(content).view(B, L, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], -1)
        k = torch.cat([k_nope, extra.unsqueeze(1).expand(B, self.heads, L, self.extra)], -1)
        return attend(q_BHTK, k, v, span, self.scale)

    def _absorbed(self, q_BHTK: Tensor, latent_BLR: Tensor, span: Span) -> Tensor:
        """Queries carried into the latent space by W_k, attention there, results carried out by W_v."""
        B, H, T, _ = q_BHTK.shape
        w_HXR = self.kv_b_proj.weight.view(H, self.nope + self.v_dim, self.rank)
        w_k, w_v = w_HXR.split([self.nope, self.v_dim], 1)
        # Head-major products: a batch-major one would copy the weights once per sequence.
        q_HNK = q_BHTK.permute(1, 0, 2, 3).reshape(H, B * T, -1)
        q_HNR = torch.cat([q_HNK[..., : self.nope] @ w_k, q_HNK[..., self.nope :]], -1)
        keys = latent_BLR.unsqueeze(1)
        q_BHTR = q_HNR.view(H, B, T, -1).transpose(0, 1)
        o_BHTR = attend(q_BHTR, keys, keys[..., : self.rank], span, self.scale)
        o_HNR = o_BHTR.transpose(0, 1).reshape(H, B * T, -1)
        return (o_HNR @ w_v.transpose(1, 2)).view(H, B, T, -1).transpose(0, 1)


def cached(pool_PGSx: Tensor, new_BGTx: Tensor, span: Span) -> Tensor:
    """Write new entries into their pages (S positions each). Returns what attention reads, [B, G, L, x]: the pages of
    each row, or just the new entries if fresh.
    """
    assert span.places_N is not None
    new_NGx = new_BGTx.transpose(1, 2).flatten(0, 1)
    page_N, offset_N = span.places_N
    pool_PGSx[page_N, :, offset_N] = (new_NGx if span.real_N is None else new_NGx[span.real_N]).to(pool_PGSx.dtype)
    return new_BGTx if span.table_BP is None else read(pool_PGSx, span)


def read(pool_PGSx: Tensor, span: Span) -> Tensor:
    """The pages of each row end to end, [B, G, L, x]; no copy where they lie that way and G is 1."""
    assert span.table_BP is not None
    if isinstance(span.slots, slice):
        rows_BPGSx = pool_PGSx.unflatten(0, (-1, span.row_pages))[span.slots, : span.table_BP.shape[1]]
        return rows_BPGSx.transpose(1, 2).flatten(2, 3)
    heads_G1 = torch.arange(pool_PGSx.shape[1], device=pool_PGSx.device).unsqueeze(1)
    return pool_PGSx[span.table_BP.unsqueeze(1), heads_G1].flatten(2, 3)


def rotate(x_BTHK: Tensor, cos_BT1K: Tensor, sin_BT1K: Tensor) -> Tensor:
    """Rotate pairs (i, i + K/2), the Hugging Face layout; sin comes with its first half negative (rope_table)."""
    return x_BTHK * cos_BT1K + x_BTHK.roll(x_BTHK.shape[-1] // 2, -1) * sin_BT1K
