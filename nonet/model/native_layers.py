"""A model as decode.c sees it: sizes, and addresses of weights in torch's memory or in copies of fewer bits.

The structures are those of native/decode_model.h, field by field.
"""

from __future__ import annotations

import ctypes

from torch import Tensor, nn

from nonet.model.attention import GQA, MLA
from nonet.model.config import ModelConfig
from nonet.model.ffn import FFN
from nonet.model.kda import KDA
from nonet.model.model import Block
from nonet.model.moe import MoE
from nonet.model.native_weights import NUMBERS, Copies, Weights
from nonet.quant.formats import Rule

MOST_CHOSEN = 64  # as in decode_model.h
_KINDS = {"gqa": 0, "kda": 1, "mla": 2}
_POINTERS = (
    *("ln1", "ln2", "gate_b", "up_b", "down_b", "gate", "up", "down"),
    *("q", "k", "v", "o", "q_b", "k_b", "v_b", "o_b", "q_norm", "k_norm"),
    *("g", "g_a", "f_a", "f_b", "beta", "decay", "dt", "q_conv", "k_conv", "v_conv", "o_norm"),
    *("q_a", "q_bb", "kv_a", "q_a_norm", "kv_a_norm", "kv_b"),
    *("w1", "w3", "w2", "latent_down", "latent_up", "router", "bias", "latent_norm"),
    *("mix1", "mix1_norm", "mix2", "mix2_norm", "pool", "pool2"),
)
_SIZES = (
    *("layers", "D", "situ", "W", "H", "residual", "G", "K", "KK", "kernel", "rank", "gate_rank", "softplus"),
    *("q_rank", "R", "nope", "extra", "VD", "E", "top_k", "EF", "L", "renormalise", "input_format", "rule"),
    *("format", "expert_format", "skip", "normed"),
)
_ENDS = ("norm", "mix", "mix_norm", "beside_norm", "stream_norm", "head", "join")
_WHERE = ("lengths", "tables", "slots", "after", "cos", "sin", "tap", "features", "beside")
_RULES = {"floor": 0, "even": 1, "ceil": 2, "rceil": 3}


class LayerAddresses(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "F", "ffn", "reads")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class ModelAddresses(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "mla_eps", "b1", "b2", "lower", "scale")),
        *((name, ctypes.c_void_p) for name in _ENDS),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "T", "width", "taps")),
        *((name, ctypes.c_void_p) for name in _WHERE),
    ]


def known(c: ModelConfig) -> bool:
    """Whether decode.c has all of this model: not the variants that only experiments use."""
    probes = c.mla_rope is not None or c.decay == "none"
    return not probes and inputs(c) in ("none", "mxfp8") and (c.moe is None or c.moe.top_k <= MOST_CHOSEN)


def inputs(c: ModelConfig) -> str:
    """The format of what experts read."""
    return c.quant.routed_expert_inputs if c.quant else "none"


def copies_of(c: ModelConfig, weights: Weights) -> tuple[Copies, Copies]:
    """Of matrices, and of routed experts: trained on the MXFP4 grid they lose nothing in it, so they are kept in it
    wherever copies are kept.
    """
    rule: Rule = "even" if c.quant is None else c.quant.rule
    exact = c.quant is not None and c.quant.routed_expert_weights == "mxfp4" and weights != "float32"
    return Copies(weights, rule), Copies("mxfp4" if exact else weights, rule)


def describe(
    c: ModelConfig, layers: int, norm: nn.Module, head_WD: Tensor, copies: Copies, experts: Copies, **more: int | None
) -> ModelAddresses:
    """Sizes, final norm, head; the layers are described one by one. more: further fields, or other values."""
    moe = c.moe
    fields = dict(
        layers=layers, D=c.d_model, situ=c.activation == "situ", W=len(head_WD), H=c.heads, residual=c.attn_res_block,
        G=c.gqa_kv_heads, K=c.gqa_head_dim, KK=c.kda_head_dim, kernel=c.conv_kernel, rank=c.decay_rank,
        gate_rank=c.gate_rank, softplus=c.decay == "softplus", q_rank=c.q_lora_rank, R=c.kv_lora_rank,
        nope=c.qk_nope_head_dim, extra=c.qk_rope_head_dim, VD=c.v_head_dim, E=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0, EF=moe.d_ff if moe else 0, L=c.expert_width,
        renormalise=bool(moe and moe.renormalise), input_format=inputs(c) != "none",
        rule=_RULES[c.quant.rule] if c.quant else 0, format=NUMBERS[copies.weights],
        expert_format=NUMBERS[experts.weights], scale=moe.scale if moe else 1.0, eps=c.norm_eps,
        mla_eps=MLA.NORM_EPS, b1=c.situ_beta, b2=c.situ_linear_beta, lower=c.gate_lower_bound, norm=at(norm),
        head=copies.at(head_WD),
    )  # fmt: skip
    return ModelAddresses(**{**fields, **more})


def describe_block(block: nn.Module, copies: Copies, experts: Copies) -> LayerAddresses:
    assert isinstance(block, Block)
    sites: dict[str, int | None] = {}
    if block.self_attention_res is not None and block.mlp_res is not None:
        sites |= {"mix1": at(block.self_attention_res.proj), "mix1_norm": at(block.self_attention_res.norm)}
        sites |= {"mix2": at(block.mlp_res.proj), "mix2_norm": at(block.mlp_res.norm)}
    norms = {"ln1": at(block.input_layernorm), "ln2": at(block.post_attention_layernorm)}
    return describe_layer(block.self_attn, block.mlp, copies, experts, **norms, **sites)


def describe_layer(
    mixer: nn.Module, feed_forward: nn.Module, copies: Copies, experts: Copies, **more: int | None
) -> LayerAddresses:
    """more: what is neither mixer nor feed-forward."""
    f, routed = feed_forward, isinstance(feed_forward, MoE)
    if isinstance(mixer, GQA):
        kind, parts = "gqa", _gqa(mixer, copies)
    elif isinstance(mixer, KDA):
        kind, parts = "kda", _kda(mixer, copies)
    else:
        kind, parts = "mla", _mla(mixer, copies)
    parts |= _routed(f, copies, experts) if isinstance(f, MoE) else _dense(f, copies)
    return LayerAddresses(kind=_KINDS[kind], ffn=routed, **parts, **more)


def _gqa(a: GQA, copies: Copies) -> dict[str, int | None]:
    projections = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj, "o": a.o_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    out |= {f"{name}_b": _bias(p) for name, p in projections.items()}
    normed = not isinstance(a.q_norm, nn.Identity)
    out |= {"q_norm": at(a.q_norm), "k_norm": at(a.k_norm)} if normed else {}
    return out | {"reads": a.q_proj.in_features}


def _kda(a: KDA, copies: Copies) -> dict[str, int | None]:
    projections = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj, "o": a.o_proj, "beta": a.b_proj}
    projections |= {"f_a": a.f_a_proj, "f_b": a.f_b_proj}
    projections |= {"g_a": a.g_a_proj, "g": a.g_b_proj} if a.low_rank else {"g": a.g_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    out |= {"q_conv": at(a.q_conv1d), "k_conv": at(a.k_conv1d), "v_conv": at(a.v_conv1d), "o_norm": at(a.o_norm)}
    return out | {"dt": a.dt_bias.data_ptr(), "decay": a.A_log.data_ptr(), "reads": a.q_proj.in_features}


def _mla(a: nn.Module, copies: Copies) -> dict[str, int | None]:
    assert isinstance(a, MLA)
    projections = {"kv_a": a.kv_a_proj_with_mqa, "o": a.o_proj} | ({"g": a.g_proj} if a.gated else {})
    projections |= {"q": a.q_proj} if a.direct else {"q_a": a.q_a_proj, "q_bb": a.q_b_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    out |= {"kv_a_norm": at(a.kv_a_layernorm), "kv_b": at(a.kv_b_proj), "reads": a.kv_a_proj_with_mqa.in_features}
    return out | ({} if a.direct else {"q_a_norm": at(a.q_a_layernorm)})


def _dense(f: nn.Module, copies: Copies) -> dict[str, int | None]:
    assert isinstance(f, FFN)
    projections = {"gate": f.gate_proj, "up": f.up_proj, "down": f.down_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    return out | {f"{name}_b": _bias(p) for name, p in projections.items()} | {"F": f.gate_proj.out_features}


def _routed(f: MoE, copies: Copies, experts: Copies) -> dict[str, int | None]:
    out: dict[str, int | None] = {"router": copies.at(f.gate.weight, "float32"), "F": 0}
    out |= {"bias": f.gate.e_score_correction_bias.data_ptr()}
    for name in ("w1", "w3", "w2"):
        weight = getattr(f.experts, name)
        out[name] = experts.at(f.experts.quant.apply(weight.detach(), "routed_expert_weights", f"experts.{name}"))
    if f.latent:
        out |= {"latent_down": copies.at(f.routed_expert_down_proj.weight)}
        out |= {"latent_up": copies.at(f.routed_expert_up_proj.weight), "latent_norm": at(f.routed_expert_norm)}
    return out | (_dense(f.shared_experts, copies) if f.shared_experts is not None else {})


def at(module: nn.Module) -> int:
    """Address of a module's float32 weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.data_ptr()


def _bias(linear: nn.Linear) -> int | None:
    return None if linear.bias is None else linear.bias.data_ptr()
