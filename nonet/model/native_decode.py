"""A model's decode step in C: same arguments and result as its torch twin, `Model.logits(model(tokens, state))`.

The C side (native/decode.c) reads float32 weights where torch keeps them, so nothing has to be refreshed after an
update; the table of addresses is rebuilt when a parameter's storage moves. Copies are kept of quantised experts, and of
all big matrices where fewer bits are asked for (native_weights.py): they are made anew when torch counts a change of a
parameter, and by `refresh`. Activations, caches, norms, routers, convolutions and MLA's kv_b stay float32. CPU only;
`NativeDecoder.of` returns None for everything that C does not know, and the caller stays with torch.
"""

from __future__ import annotations

import ctypes
import time

import torch
from torch import Tensor, nn

from nonet import native
from nonet.model.attention import GQA, MLA
from nonet.model.config import ModelConfig
from nonet.model.ffn import FFN
from nonet.model.kda import KDA
from nonet.model.model import Block, Model
from nonet.model.moe import MoE
from nonet.model.native_weights import BITS, NUMBERS, Copies, Weights, known
from nonet.model.state import SequenceState
from nonet.quant.formats import Rule

MOST, ALONE, MOST_CHOSEN = 64, 16, 64  # as in decode_model.h
LINE = 16  # floats
_A, _I = ctypes.c_void_p, ctypes.c_int64
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
    *("format", "expert_format"),
)
_RULES = {"floor": 0, "even": 1, "ceil": 2, "rceil": 3}
# Of one core, for choosing how threads share a step: bytes and operations a second, seconds a meeting of threads.
_STREAM, _ARITHMETIC, _MEET, _MEETS = 12e9, 70e9, 0.7e-6, 9
# Other work on the same cores makes a meeting last about a turn of the scheduler. A step that lost more by that than
# meeting gains is followed by a while in which nobody waits.
_TURN, _CROWDED = 3e-3, 0.05


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "F", "ffn")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "mla_eps", "b1", "b2", "lower", "scale")),
        *((name, ctypes.c_void_p) for name in ("norm", "mix", "mix_norm", "head")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "width")),
        *((name, ctypes.c_void_p) for name in ("lengths", "tables", "slots", "cos", "sin")),
    ]


class NativeDecoder:
    """`step` feeds one token to every row of a state and returns logits [B, W]."""

    @staticmethod
    def of(model: Model, weights: str = "float32") -> NativeDecoder | None:
        """weights: float32, bf16, int8 or mxfp4."""
        chosen = known(weights)
        parameters = list(model.parameters())
        plain = all(w.dtype == torch.float32 and w.device.type == "cpu" and w.is_contiguous() for w in parameters)
        library = native.library() if plain and _known(model.config) else None
        return None if library is None else NativeDecoder(model, library, chosen)

    def __init__(self, model: Model, library: ctypes.CDLL, weights: Weights = "float32"):
        self.model, self._step, self._floats = model, library.decode_step, library.decode_scratch
        self._floats.argtypes, self._floats.restype = (_A, _A, *(_I,) * 4), _I
        self._step.argtypes, self._step.restype = (*(_A,) * 6, *(_I,) * 3), _I
        self._scratch = torch.empty(0)
        self.weights: Weights = weights
        self.together: bool | None = None  # whether all threads carry the same rows; None: whichever is faster
        self._parameters = list(model.parameters())
        self._elements = sum(w.numel() for w in self._parameters) - model.embed_tokens.weight.numel()
        self._elements += model.lm_head.weight.numel()
        self._context_bytes = model.cost.bytes_per_token(4)
        self._addresses: list[int] = []
        self._pools: list[int] = []
        self._crowded_until = 0.0  # when threads try again to meet

    def step(self, tokens_B1: Tensor, state: SequenceState) -> Tensor:
        model, threads = self.model, torch.get_num_threads()
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
        gain = self._gain(state.batch, longest, threads)
        crowded = time.perf_counter() < self._crowded_until
        together = gain > 0 and not crowded if self.together is None else self.together
        scratch = self._room(state.batch, longest + 1, threads, together)
        tensors = (x_BD.data_ptr(), ctypes.addressof(rows), logits_BW.data_ptr(), scratch)
        stalls = self._step(ctypes.byref(self._model), self._layers, *tensors, longest + 1, threads, together)
        if stalls * _TURN > max(gain, 0.0):
            self._crowded_until = time.perf_counter() + _CROWDED
        state.lengths_B += 1
        return logits_BW

    def _room(self, *size: int) -> int:
        """Address of scratch that lasts from step to step, on a line of the cache."""
        floats = self._floats(ctypes.byref(self._model), self._layers, *size)
        if self._scratch.numel() < floats + LINE:
            self._scratch = torch.empty(floats + LINE)
        return -(-self._scratch.data_ptr() // 64) * 64

    def _rotation(self, state: SequenceState) -> tuple[Tensor, ...]:
        """cos and signed sin of each row's next position; nothing in a model without rotary positions."""
        turned = self.model.rotation(state.lengths_B[:, None])
        return () if turned is None else (turned[0].contiguous(), turned[1].contiguous())

    def _gain(self, rows: int, context: int, threads: int) -> float:
        """Seconds saved, or lost, if all threads carry the same rows: that reads weights once for MOST rows and
        leaves no core idle, but costs meetings. Apart, each thread carries ALONE rows and reads all weights for them.
        """
        reading = self._elements * BITS[self.weights] / 8 / _STREAM
        row = 2 * self._elements / _ARITHMETIC + context * self._context_bytes / _STREAM
        meetings = _MEET * _MEETS * len(self.model.layers) if threads > 1 else 0.0
        apart = -(-rows // (ALONE * threads)) * (reading + min(rows, ALONE) * row)
        return apart - -(-rows // MOST) * (reading / threads + meetings) - rows * row / threads

    def refresh(self) -> None:
        """The weights have changed, perhaps behind torch's back (through .data or numpy)."""
        self._addresses = []

    # ------------------------------------------------------------- addresses

    def _point(self) -> None:
        """Describe the model to C, again if any weight has moved or a copy is out of date."""
        addresses = [w.data_ptr() for w in self._parameters]
        if self.weights != "float32" or self.model.config.quant is not None:
            addresses += [0 if w.is_inference() else w._version for w in self._parameters]
        if addresses == self._addresses:
            return
        self._addresses, self._pools = addresses, []
        quant = self.model.config.quant
        rule: Rule = "even" if quant is None else quant.rule
        # Experts trained on the MXFP4 grid lose nothing in it, so they are kept in it wherever copies are kept.
        exact = quant is not None and quant.routed_expert_weights == "mxfp4" and self.weights != "float32"
        self._copies = Copies(self.weights, rule), Copies("mxfp4" if exact else self.weights, rule)
        self._model = _describe(self.model, *self._copies)
        blocks = [_layer(block, *self._copies) for block in self.model.layers]
        self._layers = (_Layer * len(blocks))(*blocks)

    def _remember(self, state: SequenceState) -> None:
        pools = [t.data_ptr() for memory in state.layers for t in memory.values()]
        if pools == self._pools:
            return
        self._pools = pools
        for layer, memory in zip(self._layers, state.layers, strict=True):
            here = [t.data_ptr() for t in memory.values()]
            layer.pool, layer.pool2 = here[0], here[-1]


def _known(c: ModelConfig) -> bool:
    """Whether decode.c has all of this model: not the variants that only experiments use."""
    probes = c.mla_rope is not None or c.decay == "none"
    return not probes and _inputs(c) in ("none", "mxfp8") and (c.moe is None or c.moe.top_k <= MOST_CHOSEN)


def _inputs(c: ModelConfig) -> str:
    return c.quant.routed_expert_inputs if c.quant else "none"


def _describe(model: Model, copies: Copies, experts: Copies) -> _Model:
    c, moe, site = model.config, model.config.moe, model.output_attn_res
    return _Model(
        layers=c.layers, D=c.d_model, situ=c.activation == "situ", W=c.vocab_size, H=c.heads, residual=c.attn_res_block,
        G=c.gqa_kv_heads, K=c.gqa_head_dim, KK=c.kda_head_dim, kernel=c.conv_kernel, rank=c.decay_rank,
        gate_rank=c.gate_rank, softplus=c.decay == "softplus", q_rank=c.q_lora_rank, R=c.kv_lora_rank,
        nope=c.qk_nope_head_dim, extra=c.qk_rope_head_dim, VD=c.v_head_dim, E=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0, EF=moe.d_ff if moe else 0, L=c.expert_width,
        renormalise=bool(moe and moe.renormalise), input_format=_inputs(c) != "none",
        rule=_RULES[c.quant.rule] if c.quant else 0, format=NUMBERS[copies.weights],
        expert_format=NUMBERS[experts.weights], scale=moe.scale if moe else 1.0, eps=c.norm_eps,
        mla_eps=MLA.NORM_EPS, b1=c.situ_beta, b2=c.situ_linear_beta, lower=c.gate_lower_bound, norm=_at(model.norm),
        mix=_at(site.proj) if site else None, mix_norm=_at(site.norm) if site else None,
        head=copies.at(model.lm_head.weight),
    )  # fmt: skip


def _layer(block: nn.Module, copies: Copies, experts: Copies) -> _Layer:
    assert isinstance(block, Block)
    a, f = block.self_attn, block.mlp
    out: dict[str, int | None] = {"ln1": _at(block.input_layernorm), "ln2": _at(block.post_attention_layernorm)}
    if block.self_attention_res is not None and block.mlp_res is not None:
        out |= {"mix1": _at(block.self_attention_res.proj), "mix1_norm": _at(block.self_attention_res.norm)}
        out |= {"mix2": _at(block.mlp_res.proj), "mix2_norm": _at(block.mlp_res.norm)}
    out |= _gqa(a, copies) if isinstance(a, GQA) else _kda(a, copies) if isinstance(a, KDA) else _mla(a, copies)
    out |= _routed(f, copies, experts) if isinstance(f, MoE) else _dense(f, copies)
    return _Layer(kind=_KINDS[block.mixer], ffn=isinstance(f, MoE), **out)


def _gqa(a: GQA, copies: Copies) -> dict[str, int | None]:
    projections = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj, "o": a.o_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    out |= {f"{name}_b": _bias(p) for name, p in projections.items()}
    normed = not isinstance(a.q_norm, nn.Identity)
    return out | ({"q_norm": _at(a.q_norm), "k_norm": _at(a.k_norm)} if normed else {})


def _kda(a: KDA, copies: Copies) -> dict[str, int | None]:
    projections = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj, "o": a.o_proj, "beta": a.b_proj}
    projections |= {"f_a": a.f_a_proj, "f_b": a.f_b_proj}
    projections |= {"g_a": a.g_a_proj, "g": a.g_b_proj} if a.low_rank else {"g": a.g_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    out |= {"q_conv": _at(a.q_conv1d), "k_conv": _at(a.k_conv1d), "v_conv": _at(a.v_conv1d), "o_norm": _at(a.o_norm)}
    return out | {"dt": a.dt_bias.data_ptr(), "decay": a.A_log.data_ptr()}


def _mla(a: nn.Module, copies: Copies) -> dict[str, int | None]:
    assert isinstance(a, MLA)
    projections = {"kv_a": a.kv_a_proj_with_mqa, "o": a.o_proj} | ({"g": a.g_proj} if a.gated else {})
    projections |= {"q": a.q_proj} if a.direct else {"q_a": a.q_a_proj, "q_bb": a.q_b_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    out |= {"kv_a_norm": _at(a.kv_a_layernorm), "kv_b": _at(a.kv_b_proj)}
    return out | ({} if a.direct else {"q_a_norm": _at(a.q_a_layernorm)})


def _dense(f: nn.Module, copies: Copies) -> dict[str, int | None]:
    assert isinstance(f, FFN)
    projections = {"gate": f.gate_proj, "up": f.up_proj, "down": f.down_proj}
    out: dict[str, int | None] = {name: copies.at(p.weight) for name, p in projections.items()}
    return out | {f"{name}_b": _bias(p) for name, p in projections.items()} | {"F": f.gate_proj.out_features}


def _routed(f: MoE, copies: Copies, experts: Copies) -> dict[str, int | None]:
    out: dict[str, int | None] = {"router": _at(f.gate), "bias": f.gate.e_score_correction_bias.data_ptr(), "F": 0}
    for name in ("w1", "w3", "w2"):
        weight = getattr(f.experts, name)
        out[name] = experts.at(f.experts.quant.apply(weight.detach(), "routed_expert_weights", f"experts.{name}"))
    if f.latent:
        out |= {"latent_down": copies.at(f.routed_expert_down_proj.weight)}
        out |= {"latent_up": copies.at(f.routed_expert_up_proj.weight), "latent_norm": _at(f.routed_expert_norm)}
    return out | (_dense(f.shared_experts, copies) if f.shared_experts is not None else {})


def _at(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.data_ptr()


def _bias(linear: nn.Linear) -> int | None:
    return None if linear.bias is None else linear.bias.data_ptr()
