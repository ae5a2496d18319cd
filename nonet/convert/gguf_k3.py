"""K3 directories as GGUF for llama.cpp's `kimi-k3` architecture.

Owns: its metadata keys and tensor names, and what the file holds in another form than the checkpoint:

    ssm_a            -exp(A_log) of the real heads (llama.cpp negates it again under a bounded decay)
    *_res_score      norm.weight * proj.weight of an attention-residual site: only the product matters
    attn_k_b         key half of kv_b_proj, transposed per head [H, rank, nope]; attn_v_b: value half [H, v, rank]
    ssm_f_a, ssm_f_b the decay bottleneck, filled up with zeros to the head size that llama.cpp expects
    ffn_*_exps       all experts of a layer in one tensor; MXFP4 codes and scales move, they are never quantised again
    output           written even if it is the embedding: the architecture has no tied head

One thing the file cannot say and llama.cpp does its own way: the published code, and our model, take 1e-6 as epsilon
in the norms of MLA's latents and in the lengths of KDA's q and k; llama.cpp has one epsilon, rms_norm_eps. The
log-probs of the models in tests/convert differ by up to 3e-4 for it. (It also rounds MXFP4 products' inputs to 8 bits.)

Refuses: what read_shape refuses, and a decay bottleneck wider than a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.convert.gguf_experts import add_experts, check_scheme
from nonet.convert.gguf_plan import Builder, Item, Kind, Options, Plan
from nonet.convert.k3_shape import K3Shape, read_shape
from nonet.convert.weights import Weights
from nonet.types import UserError

ARCHITECTURE = "kimi-k3"


def plan(weights: Weights, options: Options) -> Plan:
    """The file of a kimi_linear or kimi_k3 directory."""
    s = read_shape(weights.directory, _rank(weights))
    if s.rank > s.head_dim:
        raise UserError(
            f"{weights.directory}: the decay bottleneck (f_a_proj) has {s.rank} channels, more than "
            f"linear_attn_config.head_dim = {s.head_dim}, which GGUF's kimi-k3 cannot say"
        )
    builder = Builder(weights, options)
    check_scheme(builder)
    _top(builder, s)
    for i, is_mla in enumerate(s.mla):
        _norms(builder, s, i)
        (_mla if is_mla else _kda)(builder, s, i)
        (_dense if i < s.dense else _moe)(builder, s, i)
    items = builder.finish(s.layers)
    return Plan(ARCHITECTURE, {f"{ARCHITECTURE}.{key}": value for key, value in metadata(s).items()}, items)


def metadata(s: K3Shape) -> dict[str, Any]:
    """Keys without the architecture before them. llama.cpp runs MLA with one key head, the latent; 0 marks KDA."""
    out: dict[str, Any] = {
        "block_count": s.layers,
        "context_length": s.max_position,
        "embedding_length": s.d_model,
        "feed_forward_length": s.d_ff,
        "vocab_size": s.vocab,
        "attention.head_count": s.heads,
        "attention.head_count_kv": [int(is_mla) for is_mla in s.mla],
        "attention.layer_norm_rms_epsilon": float(s.norm_eps),
        "attention.key_length": s.kv_rank + s.extra,
        "attention.value_length": s.kv_rank,
        "attention.key_length_mla": s.nope + s.extra,
        "attention.value_length_mla": s.v_dim,
        "attention.kv_lora_rank": s.kv_rank,
        "rope.dimension_count": s.extra,  # sizes the part of the keys that is outside the latent; nothing is rotated
        "ssm.conv_kernel": s.kernel,
        "kda.head_dim": s.head_dim,
        "attn_res.block_size": s.block,
        "activation.situ_beta": float(s.situ[0]),
        "activation.situ_linear_beta": float(s.situ[1]),
        "leading_dense_block_count": s.dense,
        "expert_count": s.experts,
        "expert_used_count": s.top_k,
        "expert_feed_forward_length": s.expert_ff,
        "expert_shared_count": s.shared,
        "expert_weights_scale": float(s.scale),
        "expert_weights_norm": s.renormalise,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }
    optional: dict[str, Any] = {
        "attention.q_lora_rank": s.q_rank or None,
        "expert_latent_length": s.latent or None,
        "kda.gate_lower_bound": None if s.lower is None else float(s.lower),
    }
    return out | {key: value for key, value in optional.items() if value is not None}


def _rank(weights: Weights) -> int:
    """Channels of the decay bottleneck; 0 if the directory has none."""
    return next((weights.entry(n).shape[0] for n in weights if n.endswith(".self_attn.f_a_proj.weight")), 0)


# ------------------------------------------------------------------- tensors


def _top(b: Builder, s: K3Shape) -> None:
    embed = "model.embed_tokens.weight"
    b.add("token_embd.weight", embed, (s.vocab, s.d_model))
    b.add("output_norm.weight", "model.norm.weight", (s.d_model,))
    tied = s.tied and "lm_head.weight" not in b.weights
    b.add("output.weight", embed if tied else "lm_head.weight", (s.vocab, s.d_model))
    if s.block:
        _score(b, "output_res_score.weight", "model.output_attn_res", s)


def _norms(b: Builder, s: K3Shape, i: int) -> None:
    ours, theirs = f"model.layers.{i}.", f"blk.{i}."
    b.add(f"{theirs}attn_norm.weight", f"{ours}input_layernorm.weight", (s.d_model,))
    b.add(f"{theirs}ffn_norm.weight", f"{ours}post_attention_layernorm.weight", (s.d_model,))
    if s.block:
        _score(b, f"{theirs}attn_res_score.weight", f"{ours}self_attention_res", s)
        _score(b, f"{theirs}ffn_res_score.weight", f"{ours}mlp_res", s)


def _score(b: Builder, theirs: str, site: str, s: K3Shape) -> None:
    """A mixing site's query, its key norm multiplied in (in float32)."""
    norm, proj = f"{site}_norm.weight", f"{site}_proj.weight"
    b.take(norm, (s.d_model,))
    b.take(proj, (1, s.d_model))
    load: Callable[[], np.ndarray] = lambda: (b.weights.read(norm).float() * b.weights.read(proj).float()[0]).numpy()  # noqa: E731
    b.items.append(Item(theirs, (s.d_model,), Kind.F32, load))


def _kda(b: Builder, s: K3Shape, i: int) -> None:
    ours, theirs, C, D = f"model.layers.{i}.self_attn.", f"blk.{i}.", s.width, s.d_model
    for part in "qkv":
        b.add(f"{theirs}attn_{part}.weight", f"{ours}{part}_proj.weight", (C, D))
        shape, out = (C, 1, s.kernel), (1, C, 1, s.kernel)
        change = lambda t, out=out: t.reshape(out)  # noqa: E731
        b.add(f"{theirs}ssm_conv1d_{part}.weight", f"{ours}{part}_conv1d.weight", shape, change, out, exact=True)
    b.add(f"{theirs}ssm_f_a.weight", f"{ours}f_a_proj.weight", (s.rank, D), lambda t: _filled(t, s, 0), (s.head_dim, D))
    b.add(f"{theirs}ssm_f_b.weight", f"{ours}f_b_proj.weight", (C, s.rank), lambda t: _filled(t, s, 1), (C, s.head_dim))
    b.add(f"{theirs}ssm_beta.weight", f"{ours}b_proj.weight", (s.heads, D))
    b.add(f"{theirs}ssm_g.weight", f"{ours}g_proj.weight", (C, D))
    b.add(f"{theirs}ssm_dt.bias", f"{ours}dt_bias", (C,))
    b.add(f"{theirs}ssm_norm.weight", f"{ours}o_norm.weight", (s.head_dim,))
    b.add(f"{theirs}attn_output.weight", f"{ours}o_proj.weight", (D, C))
    name = f"{ours}A_log"
    shape = b.weights.entry(name).shape
    spellings = (s.heads,), (-(-s.heads // 128) * 128,), (1, 1, s.heads, 1)  # K3 fills it up with zeros
    b.add(
        f"{theirs}ssm_a",
        name,
        shape if shape in spellings else (s.heads,),
        lambda t: _decay(t, s.heads, name),
        (s.heads,),
    )


def _filled(tensor: Tensor, s: K3Shape, dim: int) -> Tensor:
    """Zeros behind the bottleneck's channels: the product of the two matrices stays the same."""
    more = s.head_dim - s.rank
    return F.pad(tensor, (0, more) if dim == 1 else (0, 0, 0, more))


def _decay(A_log: Tensor, heads: int, name: str) -> Tensor:
    flat = A_log.flatten()
    if flat[heads:].any():
        raise UserError(f"{name} has non-zero values beyond its {heads} heads; replace the file")
    return -torch.exp(flat[:heads].float())


def _mla(b: Builder, s: K3Shape, i: int) -> None:
    ours, theirs, D = f"model.layers.{i}.self_attn.", f"blk.{i}.", s.d_model
    queries = s.heads * (s.nope + s.extra)
    if s.q_rank:
        b.add(f"{theirs}attn_q_a.weight", f"{ours}q_a_proj.weight", (s.q_rank, D))
        b.add(f"{theirs}attn_q_a_norm.weight", f"{ours}q_a_layernorm.weight", (s.q_rank,))
        b.add(f"{theirs}attn_q_b.weight", f"{ours}q_b_proj.weight", (queries, s.q_rank))
    else:
        b.add(f"{theirs}attn_q.weight", f"{ours}q_proj.weight", (queries, D))
    b.add(f"{theirs}attn_kv_a_mqa.weight", f"{ours}kv_a_proj_with_mqa.weight", (s.kv_rank + s.extra, D))
    b.add(f"{theirs}attn_kv_a_norm.weight", f"{ours}kv_a_layernorm.weight", (s.kv_rank,))
    name, whole = f"{ours}kv_b_proj.weight", (s.heads * (s.nope + s.v_dim), s.kv_rank)
    split = lambda t: t.reshape(s.heads, s.nope + s.v_dim, s.kv_rank).split([s.nope, s.v_dim], 1)  # noqa: E731
    k_b, v_b = (s.heads, s.kv_rank, s.nope), (s.heads, s.v_dim, s.kv_rank)
    b.add(f"{theirs}attn_k_b.weight", name, whole, lambda t: split(t)[0].transpose(1, 2), k_b)
    b.add(f"{theirs}attn_v_b.weight", name, whole, lambda t: split(t)[1], v_b)
    if s.gate:
        b.add(f"{theirs}attn_gate.weight", f"{ours}g_proj.weight", (s.heads * s.v_dim, D))
    b.add(f"{theirs}attn_output.weight", f"{ours}o_proj.weight", (D, s.heads * s.v_dim))


def _dense(b: Builder, s: K3Shape, i: int) -> None:
    _ffn(b, f"model.layers.{i}.mlp.", f"blk.{i}.", "", s.d_model, s.d_ff)


def _ffn(b: Builder, ours: str, theirs: str, suffix: str, D: int, width: int) -> None:
    for part in ("gate", "up", "down"):
        shape = (D, width) if part == "down" else (width, D)
        b.add(f"{theirs}ffn_{part}{suffix}.weight", f"{ours}{part}_proj.weight", shape)


def _moe(b: Builder, s: K3Shape, i: int) -> None:
    ours, theirs, D = f"model.layers.{i}.block_sparse_moe.", f"blk.{i}.", s.d_model
    b.add(f"{theirs}ffn_gate_inp.weight", f"{ours}gate.weight", (s.experts, D), exact=True)
    b.add(f"{theirs}exp_probs_b.bias", f"{ours}gate.e_score_correction_bias", (s.experts,))
    if s.latent:
        b.add(f"{theirs}ffn_routed_down.weight", f"{ours}routed_expert_down_proj.weight", (s.latent, D))
        b.add(f"{theirs}ffn_routed_up.weight", f"{ours}routed_expert_up_proj.weight", (D, s.latent))
    if s.latent_norm:
        b.add(f"{theirs}ffn_routed_norm.weight", f"{ours}routed_expert_norm.weight", (s.latent,))
    if s.shared:
        _ffn(b, f"{ours}shared_experts.", theirs, "_shexp", D, s.shared * s.expert_ff)
    add_experts(b, s, i)
