"""A model's decode step in C: same arguments and result as its torch twin, `Model.logits(model(tokens, state))`.

The C side (native/decode.c) reads weights where torch keeps them, so nothing has to be refreshed after an update; the
table of addresses is rebuilt when a parameter's storage moves. The exception are quantised experts, of which copies on
their grid are kept: they are made anew when torch counts a change of a parameter, and by `refresh`. float32 on the CPU
only; `NativeDecoder.of` returns None for everything else, and the caller stays with torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from nonet import native
from nonet.model.attention import GQA, MLA
from nonet.model.config import ModelConfig
from nonet.model.ffn import FFN
from nonet.model.kda import KDA
from nonet.model.model import Block, Model
from nonet.model.moe import MoE
from nonet.model.state import SequenceState

BLOCK, LANES, MOST_CHOSEN = 16, 16, 64  # as in decode_model.h and decode_experts.h
_KINDS = {"gqa": 0, "kda": 1, "mla": 2}
_POINTERS = (
    *("ln1", "ln2", "gate", "up", "down", "gate_b", "up_b", "down_b"),
    *("q", "k", "v", "o", "q_b", "k_b", "v_b", "o_b", "q_norm", "k_norm"),
    *("g", "g_a", "f_a", "f_b", "beta", "decay", "dt", "q_conv", "k_conv", "v_conv", "o_norm"),
    *("q_a", "q_a_norm", "q_bb", "kv_a", "kv_a_norm", "kv_b"),
    *("router", "bias", "w1", "w3", "w2", "latent_down", "latent_up", "latent_norm"),
    *("mix1", "mix1_norm", "mix2", "mix2_norm", "pool", "pool2"),
)
_SIZES = (
    *("layers", "D", "situ", "W", "H", "residual", "G", "K", "KK", "kernel", "rank", "gate_rank", "softplus"),
    *("q_rank", "R", "nope", "extra", "VD", "E", "top_k", "EF", "L", "renormalise", "input_format", "rule"),
)
_RULES = {"floor": 0, "even": 1, "ceil": 2, "rceil": 3}


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "F", "ffn")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "mla_eps", "b1", "b2", "lower", "scale")),
        *((name, ctypes.c_void_p) for name in ("norm", "head", "mix", "mix_norm")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "width")),
        *((name, ctypes.c_void_p) for name in ("lengths", "tables", "slots", "cos", "sin")),
    ]


class NativeDecoder:
    """`step` feeds one token to every row of a state and returns logits [B, W]."""

    @staticmethod
    def of(model: Model) -> NativeDecoder | None:
        weights = list(model.parameters())
        plain = all(w.dtype == torch.float32 and w.device.type == "cpu" and w.is_contiguous() for w in weights)
        library = native.library() if plain and _known(model.config) else None
        return None if library is None else NativeDecoder(model, library)

    def __init__(self, model: Model, library: ctypes.CDLL):
        self.model, self._step = model, library.decode_step
        self._weights = list(model.parameters())
        self._addresses: list[int] = []
        self._quantised: dict[str, Tensor] = {}

    def step(self, tokens_B1: Tensor, state: SequenceState) -> Tensor:
        model = self.model
        longest = int(state.lengths_B.max())
        if longest >= state.capacity:
            raise ValueError(f"state has room for {state.capacity} positions, this call needs {longest + 1}")
        self._point()
        self._remember(state)
        x_BD = model.embed_tokens(tokens_B1[:, 0]).contiguous()
        logits_BW = x_BD.new_empty(len(x_BD), model.config.vocab_size)
        table, slots, turned = state.table_BP.contiguous(), state.slot_B.contiguous(), self._rotation(state)
        addresses = (state.lengths_B.data_ptr(), table.data_ptr(), slots.data_ptr(), *(t.data_ptr() for t in turned))
        rows = _Rows(state.batch, table.shape[1], *addresses)
        room = scratch_floats(model.config, state.capacity)
        limits = (ctypes.c_int64(room), ctypes.c_int64(torch.get_num_threads()))
        x, logits = ctypes.c_void_p(x_BD.data_ptr()), ctypes.c_void_p(logits_BW.data_ptr())
        failed = self._step(ctypes.byref(self._model), self._layers, x, ctypes.byref(rows), logits, *limits)
        if failed:
            raise MemoryError(f"decode_step: no memory for {room} floats of scratch a thread")
        state.lengths_B += 1
        return logits_BW

    def _rotation(self, state: SequenceState) -> tuple[Tensor, ...]:
        """cos and signed sin of each row's next position; nothing in a model without rotary positions."""
        turned = self.model.rotation(state.lengths_B[:, None])
        return () if turned is None else (turned[0].contiguous(), turned[1].contiguous())

    def refresh(self) -> None:
        """The weights have changed, perhaps behind torch's back (through .data or numpy)."""
        self._addresses = []

    # ------------------------------------------------------------- addresses

    def _point(self) -> None:
        """Describe the model to C, again if any weight has moved; gates that C wants exponentiated are refreshed."""
        addresses = [w.data_ptr() for w in self._weights]
        if self.model.config.quant is not None:  # copies on the experts' grid age with every change of the originals
            addresses += [0 if w.is_inference() else w._version for w in self._weights]
        if addresses != self._addresses:
            self._addresses = addresses
            self._model = _describe(self.model)
            self._decays = [torch.empty(self.model.config.heads) for _ in self.model.layers]
            self._quantised = {}
            blocks = [_layer(block, self._quantised) for block in self.model.layers]
            self._layers = (_Layer * len(blocks))(*blocks)
        for block, layer, decay in zip(self.model.layers, self._layers, self._decays, strict=True):
            if isinstance(block.self_attn, KDA):
                torch.exp(block.self_attn.A_log, out=decay)
                layer.decay = decay.data_ptr()

    def _remember(self, state: SequenceState) -> None:
        for layer, memory in zip(self._layers, state.layers, strict=True):
            pools = [t.data_ptr() for t in memory.values()]
            layer.pool, layer.pool2 = pools[0], pools[-1]


def _known(c: ModelConfig) -> bool:
    """Whether decode.c has all of this model: not the variants that only experiments use."""
    probes = c.mla_rope is not None or c.decay == "none"
    return not probes and _inputs(c) in ("none", "mxfp8") and (c.moe is None or c.moe.top_k <= MOST_CHOSEN)


def _inputs(c: ModelConfig) -> str:
    return c.quant.routed_expert_inputs if c.quant else "none"


def _describe(model: Model) -> _Model:
    c, moe, site = model.config, model.config.moe, model.output_attn_res
    return _Model(
        layers=c.layers, D=c.d_model, situ=c.activation == "situ", W=c.vocab_size, H=c.heads, residual=c.attn_res_block,
        G=c.gqa_kv_heads, K=c.gqa_head_dim, KK=c.kda_head_dim, kernel=c.conv_kernel, rank=c.decay_rank,
        gate_rank=c.gate_rank, softplus=c.decay == "softplus", q_rank=c.q_lora_rank, R=c.kv_lora_rank,
        nope=c.qk_nope_head_dim, extra=c.qk_rope_head_dim, VD=c.v_head_dim, E=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0, EF=moe.d_ff if moe else 0, L=c.expert_width,
        renormalise=bool(moe and moe.renormalise), input_format=_inputs(c) != "none",
        rule=_RULES[c.quant.rule] if c.quant else 0, scale=moe.scale if moe else 1.0, eps=c.norm_eps,
        mla_eps=MLA.NORM_EPS, b1=c.situ_beta, b2=c.situ_linear_beta, lower=c.gate_lower_bound, norm=_at(model.norm),
        head=_at(model.lm_head), mix=_at(site.proj) if site else None, mix_norm=_at(site.norm) if site else None,
    )  # fmt: skip


def _layer(block: nn.Module, quantised: dict[str, Tensor]) -> _Layer:
    assert isinstance(block, Block)
    a, f = block.self_attn, block.mlp
    out: dict[str, int | None] = {"ln1": _at(block.input_layernorm), "ln2": _at(block.post_attention_layernorm)}
    if block.self_attention_res is not None and block.mlp_res is not None:
        out |= {"mix1": _at(block.self_attention_res.proj), "mix1_norm": _at(block.self_attention_res.norm)}
        out |= {"mix2": _at(block.mlp_res.proj), "mix2_norm": _at(block.mlp_res.norm)}
    out |= _mixer(a) | (_routed(f, quantised) if isinstance(f, MoE) else _dense(f))
    return _Layer(kind=_KINDS[block.mixer], ffn=isinstance(f, MoE), **out)


def _mixer(a: nn.Module) -> dict[str, int | None]:
    if isinstance(a, GQA):
        out = {"q": _at(a.q_proj), "k": _at(a.k_proj), "v": _at(a.v_proj), "o": _at(a.o_proj), "o_b": _bias(a.o_proj)}
        out |= {"q_b": _bias(a.q_proj), "k_b": _bias(a.k_proj), "v_b": _bias(a.v_proj)}
        normed = not isinstance(a.q_norm, nn.Identity)
        return out | ({"q_norm": _at(a.q_norm), "k_norm": _at(a.k_norm)} if normed else {})
    if isinstance(a, KDA):
        out: dict[str, int | None] = {"q": _at(a.q_proj), "k": _at(a.k_proj), "v": _at(a.v_proj)}
        out |= {"o": _at(a.o_proj), "beta": _at(a.b_proj)}
        out |= {"f_a": _at(a.f_a_proj), "f_b": _at(a.f_b_proj), "o_norm": _at(a.o_norm), "dt": a.dt_bias.data_ptr()}
        out |= {"q_conv": _at(a.q_conv1d), "k_conv": _at(a.k_conv1d), "v_conv": _at(a.v_conv1d)}
        return out | ({"g_a": _at(a.g_a_proj), "g": _at(a.g_b_proj)} if a.low_rank else {"g": _at(a.g_proj)})
    assert isinstance(a, MLA)
    out = {"kv_a": _at(a.kv_a_proj_with_mqa), "kv_a_norm": _at(a.kv_a_layernorm), "kv_b": _at(a.kv_b_proj)}
    out |= {"o": _at(a.o_proj), "g": _at(a.g_proj) if a.gated else None}
    if a.direct:
        return out | {"q": _at(a.q_proj)}
    return out | {"q_a": _at(a.q_a_proj), "q_a_norm": _at(a.q_a_layernorm), "q_bb": _at(a.q_b_proj)}


def _dense(f: nn.Module) -> dict[str, int | None]:
    assert isinstance(f, FFN)
    out: dict[str, int | None] = {"F": f.gate_proj.out_features}
    out |= {"gate": _at(f.gate_proj), "up": _at(f.up_proj), "down": _at(f.down_proj)}
    return out | {"gate_b": _bias(f.gate_proj), "up_b": _bias(f.up_proj), "down_b": _bias(f.down_proj)}


def _routed(f: MoE, quantised: dict[str, Tensor]) -> dict[str, int | None]:
    """quantised: where copies on the experts' grid are kept alive."""
    out: dict[str, int | None] = {"router": _at(f.gate), "bias": f.gate.e_score_correction_bias.data_ptr(), "F": 0}
    for name in ("w1", "w3", "w2"):
        weight = getattr(f.experts, name)
        seen = f.experts.quant.apply(weight.detach(), "routed_expert_weights", f"experts.{name}")
        if seen is not weight:
            quantised[f"{id(f)}.{name}"] = seen
        out[name] = seen.data_ptr()
    if f.latent:
        out |= {"latent_down": _at(f.routed_expert_down_proj), "latent_up": _at(f.routed_expert_up_proj)}
        out["latent_norm"] = _at(f.routed_expert_norm)
    return out | (_dense(f.shared_experts) if f.shared_experts is not None else {})


def _at(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.data_ptr()


def _bias(linear: nn.Linear) -> int | None:
    return None if linear.bias is None else linear.bias.data_ptr()


def scratch_floats(c: ModelConfig, capacity: int) -> int:
    """Upper bound of what one thread lays out in decode.c for a block of rows."""
    heads, moe = c.heads, c.moe
    gqa = 2 * (heads + c.gqa_kv_heads) * c.gqa_head_dim
    kda = 6 * c.kda_width + max(c.decay_rank, c.gate_rank) + heads
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    mla = c.q_lora_rank + heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + 2 * c.v_head_dim) + latent
    dense = 2 * max(c.d_ff, moe.shared * moe.d_ff if moe else 0)
    routed = moe.experts + 4 * c.expert_width + 2 * moe.d_ff + c.d_model + dense if moe else 0
    sources = -(-c.layers // c.attn_res_block) if c.attn_res_block else 0
    stream = 3 * c.d_model + sources * (c.d_model + 1)
    single = 2 * latent + capacity + c.d_model + sources + 12 * LANES
    return BLOCK * (stream + max(gqa, kda, mla, dense, routed)) + single
