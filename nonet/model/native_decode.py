"""A model's decode step in C: same arguments and result as its torch twin, `Model.logits(model(tokens, state))`.

The C side (native/decode.c) reads weights where torch keeps them, so nothing has to be refreshed after an update; the
table of addresses is rebuilt when a parameter's storage moves. float32 on the CPU only; `NativeDecoder.of` returns None
for everything else, and the caller stays with torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from nonet import native
from nonet.model.attention import GQA, MLA
from nonet.model.config import ModelConfig
from nonet.model.kda import KDA
from nonet.model.model import Block, Model
from nonet.model.state import SequenceState

BLOCK, LANES = 16, 16  # as in decode.c
_KINDS = {"gqa": 0, "kda": 1, "mla": 2}
_POINTERS = (
    *("ln1", "ln2", "gate", "up", "down", "gate_b", "up_b", "down_b"),
    *("q", "k", "v", "o", "q_b", "k_b", "v_b", "o_b", "q_norm", "k_norm"),
    *("g", "f_a", "f_b", "beta", "decay", "dt", "q_conv", "k_conv", "v_conv", "o_norm"),
    *("q_a", "q_a_norm", "q_bb", "kv_a", "kv_a_norm", "kv_b", "cache", "cache2"),
)
_SIZES = (
    *("layers", "D", "F", "situ", "W", "H", "G", "K", "KK", "kernel", "rank"),
    *("q_rank", "R", "nope", "extra", "VD"),
)


class _Layer(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int64), *((name, ctypes.c_void_p) for name in _POINTERS)]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "b1", "b2", "lower")),
        *((name, ctypes.c_void_p) for name in ("norm", "head")),
    ]


class NativeDecoder:
    """`step` feeds one token to every row of a state and returns logits [B, W]."""

    @staticmethod
    def of(model: Model) -> NativeDecoder | None:
        weights = list(model.parameters())
        plain = all(w.dtype == torch.float32 and w.device.type == "cpu" and w.is_contiguous() for w in weights)
        library = native.library() if plain else None
        return None if library is None else NativeDecoder(model, library)

    def __init__(self, model: Model, library: ctypes.CDLL):
        self.model, self._step = model, library.decode_step
        self._weights = list(model.parameters())
        self._addresses: list[int] = []

    def step(self, tokens_B1: Tensor, state: SequenceState) -> Tensor:
        model = self.model
        longest = int(state.lengths_B.max())
        if longest >= state.capacity:
            raise ValueError(f"state has room for {state.capacity} positions, this call needs {longest + 1}")
        self._point()
        self._remember(state)
        x_BD = model.embed_tokens(tokens_B1[:, 0]).contiguous()
        logits_BW = x_BD.new_empty(len(x_BD), model.config.vocab_size)
        turned = model.rotation(state.lengths_B[:, None])
        cos, sin = (None, None) if turned is None else (t.contiguous().data_ptr() for t in turned)
        lengths, B, capacity = state.lengths_B.data_ptr(), state.batch, state.capacity
        room = scratch_floats(model.config, capacity)
        pointers = map(ctypes.c_void_p, (x_BD.data_ptr(), lengths))
        turns = map(ctypes.c_void_p, (cos, sin, logits_BW.data_ptr()))
        sizes = (ctypes.c_int64(B), ctypes.c_int64(capacity))
        limits = (ctypes.c_int64(room), ctypes.c_int64(torch.get_num_threads()))
        failed = self._step(ctypes.byref(self._model), self._layers, *pointers, *sizes, *turns, *limits)
        if failed:
            raise MemoryError(f"decode_step: no memory for {room} floats of scratch a thread")
        state.lengths_B += 1
        return logits_BW

    # ------------------------------------------------------------- addresses

    def _point(self) -> None:
        """Describe the model to C, again if any weight has moved; gates that C wants exponentiated are refreshed."""
        addresses = [w.data_ptr() for w in self._weights]
        if addresses != self._addresses:
            self._addresses = addresses
            self._model = _describe(self.model)
            self._decays = [torch.empty(self.model.config.heads) for _ in self.model.layers]
            self._layers = (_Layer * len(self.model.layers))(*(_layer(block) for block in self.model.layers))
        for block, layer, decay in zip(self.model.layers, self._layers, self._decays, strict=True):
            if isinstance(block.self_attn, KDA):
                torch.exp(block.self_attn.A_log, out=decay)
                layer.decay = decay.data_ptr()

    def _remember(self, state: SequenceState) -> None:
        for layer, memory in zip(self._layers, state.layers, strict=True):
            caches = [t.data_ptr() for t in memory.values()]
            layer.cache, layer.cache2 = caches[0], caches[-1]


def _describe(model: Model) -> _Model:
    c = model.config
    return _Model(
        layers=c.layers, D=c.d_model, F=c.d_ff, situ=c.activation == "situ", W=c.vocab_size, H=c.heads,
        G=c.gqa_kv_heads, K=c.gqa_head_dim, KK=c.kda_head_dim, kernel=c.conv_kernel, rank=c.decay_rank,
        q_rank=c.q_lora_rank, R=c.kv_lora_rank, nope=c.qk_nope_head_dim, extra=c.qk_rope_head_dim, VD=c.v_head_dim,
        eps=c.norm_eps, b1=c.situ_beta, b2=c.situ_linear_beta, lower=c.gate_lower_bound,
        norm=_at(model.norm), head=_at(model.lm_head),
    )  # fmt: skip


def _layer(block: nn.Module) -> _Layer:
    assert isinstance(block, Block)
    a, f = block.self_attn, block.mlp
    out = {
        "ln1": _at(block.input_layernorm), "ln2": _at(block.post_attention_layernorm), "o": _at(a.o_proj),
        "gate": _at(f.gate_proj), "up": _at(f.up_proj), "down": _at(f.down_proj),
        "gate_b": _bias(f.gate_proj), "up_b": _bias(f.up_proj), "down_b": _bias(f.down_proj),
    }  # fmt: skip
    if isinstance(a, GQA):
        out |= {"q": _at(a.q_proj), "k": _at(a.k_proj), "v": _at(a.v_proj), "o_b": _bias(a.o_proj)}
        out |= {"q_b": _bias(a.q_proj), "k_b": _bias(a.k_proj), "v_b": _bias(a.v_proj)}
        if not isinstance(a.q_norm, nn.Identity):
            out |= {"q_norm": _at(a.q_norm), "k_norm": _at(a.k_norm)}
    elif isinstance(a, KDA):
        out |= {"q": _at(a.q_proj), "k": _at(a.k_proj), "v": _at(a.v_proj), "g": _at(a.g_proj)}
        out |= {"f_a": _at(a.f_a_proj), "f_b": _at(a.f_b_proj), "beta": _at(a.b_proj), "o_norm": _at(a.o_norm)}
        out |= {"q_conv": _at(a.q_conv1d), "k_conv": _at(a.k_conv1d), "v_conv": _at(a.v_conv1d)}
        out |= {"dt": a.dt_bias.data_ptr()}
    elif isinstance(a, MLA):
        out |= {"q_a": _at(a.q_a_proj), "q_a_norm": _at(a.q_a_layernorm), "q_bb": _at(a.q_b_proj), "g": _at(a.g_proj)}
        out |= {"kv_a": _at(a.kv_a_proj_with_mqa), "kv_a_norm": _at(a.kv_a_layernorm), "kv_b": _at(a.kv_b_proj)}
    return _Layer(kind=_KINDS[block.mixer], **out)


def _at(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.data_ptr()


def _bias(linear: nn.Linear) -> int | None:
    return None if linear.bias is None else linear.bias.data_ptr()


def scratch_floats(c: ModelConfig, capacity: int) -> int:
    """Upper bound of what one thread lays out in decode.c for a block of rows."""
    heads = c.heads
    gqa = 2 * (heads + c.gqa_kv_heads) * c.gqa_head_dim
    kda = 6 * c.kda_width + c.decay_rank + heads
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    mla = c.q_lora_rank + heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + 2 * c.v_head_dim) + latent
    widest = max(gqa, kda, mla, 2 * c.d_ff)
    return BLOCK * (2 * c.d_model + widest) + 2 * latent + capacity + 8 * LANES
