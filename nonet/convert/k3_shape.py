"""The dimensions of a K3 checkpoint, read from config.json as GGUF's kimi-k3 architecture can say them.

Owns: which fields of config.json (k3 section 1.1) llama.cpp's kimi-k3 has a place for, and which values of the others
mean "not in use". Refuses, naming field and value: everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.model.hf_config import read_json
from nonet.model.hf_kimi import text_table
from nonet.types import UserError

# Values under which a field changes nothing that the file could not say; absent counts as None.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("situ",),
    "mla_use_nope": (True,),
    "linear_attn_config.use_full_rank_gate": (True,),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "moe_layer_freq": (None, 1),
    "moe_router_activation_func": (None, "sigmoid"),
    "num_expert_group": (None, 1),
    "topk_group": (None, 1),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
}
# Our own fields that say how the model is trained, not what it computes.
TRAINING = {
    *("init_std", "moe.balance", "moe.sign_step"),
    *("quant.rule", "quant.zero_saturated"),
    "quant.routed_expert_inputs",  # K3's own files do not say it either: each engine rounds inputs its own way
}


@dataclass(frozen=True)
class K3Shape:
    """Numbers of the text model. mla: per layer, True for MLA, False for KDA. experts = 0: every layer is dense."""

    vocab: int
    d_model: int
    layers: int
    heads: int
    d_ff: int
    norm_eps: float
    max_position: int
    tied: bool
    mla: tuple[bool, ...]
    block: int
    situ: tuple[float, float]
    # kda
    head_dim: int
    kernel: int
    rank: int
    lower: float | None
    # mla
    q_rank: int
    kv_rank: int
    nope: int
    extra: int
    v_dim: int
    gate: bool
    # experts
    experts: int
    top_k: int
    expert_ff: int
    shared: int
    latent: int
    latent_norm: bool
    dense: int
    renormalise: bool
    scale: float

    @property
    def width(self) -> int:
        """Channels of a KDA layer."""
        return self.heads * self.head_dim


def text_config(directory: Path) -> dict[str, Any]:
    """config.json of a text model, or the text part of one with a vision tower."""
    file = directory / "config.json"
    return text_table(read_json(file), file)[0]


def read_shape(directory: Path, rank: int) -> K3Shape:
    """The shape of a kimi_linear or kimi_k3 directory; `rank` is its decay bottleneck, which only tensors tell."""
    return _Reader(text_config(directory), directory / "config.json").shape(rank)


class _Reader:
    def __init__(self, raw: Mapping[str, Any], file: Path):
        self.raw, self.file = raw, file

    def get(self, key: str) -> Any:
        value: Any = self.raw
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, kind: type = int, default: Any = None, low: float = 1) -> Any:
        value = default if self.get(key) is None else self.get(key)
        good = isinstance(value, bool) if kind is bool else isinstance(value, (int, kind)) and type(value) is not bool
        if not good or (kind is int and value < low):
            wanted = {int: f"an integer of at least {low}", float: "a number", bool: "true or false"}[kind]
            raise UserError(f"{self.file}: {key} = {value!r}: must be {wanted} for an export; correct the config")
        return value

    def shape(self, rank: int) -> K3Shape:
        self._refuse()
        layers, heads = self.number("num_hidden_layers"), self.number("num_attention_heads")
        lower = self.get("linear_attn_config.gate_lower_bound")
        return K3Shape(
            vocab=self.number("vocab_size"),
            d_model=self.number("hidden_size"),
            layers=layers,
            heads=heads,
            d_ff=self.number("intermediate_size"),
            norm_eps=self.number("rms_norm_eps", float),
            max_position=self.number("max_position_embeddings", default=self.get("model_max_length") or 1 << 20),
            tied=self.number("tie_word_embeddings", bool, False),
            mla=self._mla(layers, heads),
            block=self.number("attn_res_block_size", default=0, low=0),
            situ=(self.number("activation_situ_beta", float), self.number("activation_situ_linear_beta", float)),
            head_dim=self.number("linear_attn_config.head_dim"),
            kernel=self.number("linear_attn_config.short_conv_kernel_size", low=2),
            rank=rank,
            lower=None if lower is None else self.number("linear_attn_config.gate_lower_bound", float),
            q_rank=self.number("q_lora_rank", default=0, low=0),
            kv_rank=self.number("kv_lora_rank"),
            nope=self.number("qk_nope_head_dim"),
            extra=self.number("qk_rope_head_dim"),
            v_dim=self.number("v_head_dim"),
            gate=self.number("mla_use_output_gate", bool, False),
            **self._experts(layers),
        )

    def _experts(self, layers: int) -> dict[str, Any]:
        experts = self.number("num_experts", default=0, low=0)
        latent = self.number("routed_expert_hidden_size", default=0, low=0)
        return {
            "experts": experts,
            "top_k": self.number("num_experts_per_token") if experts else 0,
            "expert_ff": self.number("moe_intermediate_size") if experts else 0,
            "shared": self.number("num_shared_experts", default=0, low=0) if experts else 0,
            "latent": latent if experts else 0,
            "latent_norm": bool(experts and latent) and self.number("latent_moe_use_norm", bool, False),
            "dense": min(layers, self.number("first_k_dense_replace", default=0, low=0)) if experts else layers,
            "renormalise": self.number("moe_renormalize", bool, True),
            "scale": self.number("routed_scaling_factor", float, 1.0),
        }

    def _mla(self, layers: int, heads: int) -> tuple[bool, ...]:
        """Which layers are MLA. config.json counts layers from 1."""
        if self.number("linear_attn_config.num_heads", default=heads) != heads:
            raise UserError(
                f"{self.file}: linear_attn_config.num_heads = {self.get('linear_attn_config.num_heads')} differs from "
                f"num_attention_heads = {heads}; GGUF's kimi-k3 has one head count"
            )
        kda, full = (self.get(f"linear_attn_config.{key}") or [] for key in ("kda_layers", "full_attn_layers"))
        if sorted([*kda, *full], key=str) != sorted(range(1, layers + 1), key=str):
            raise UserError(
                f"{self.file}: linear_attn_config.kda_layers and full_attn_layers must name each of the layers 1 to "
                f"{layers} once; correct the lists"
            )
        if not kda or not full:
            raise UserError(
                f"{self.file}: GGUF's kimi-k3 needs KDA and MLA layers; this model has {len(kda)} and {len(full)}"
            )
        return tuple(i + 1 in full for i in range(layers))

    def _refuse(self) -> None:
        for key, allowed in FIXED.items():
            if (value := self.get(key)) not in allowed:
                wanted = " or ".join("absent" if a is None else repr(a) for a in allowed)
                raise UserError(f"{self.file}: {key} = {value!r} has no place in GGUF's kimi-k3; only {wanted} has")
        for key, value in _flat(self.raw.get("nonet", {})):
            if key not in TRAINING:
                raise UserError(f"{self.file}: nonet.{key} = {value!r} has no place in GGUF's kimi-k3")


def _flat(table: Any, prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in table.items() if isinstance(table, Mapping) else ():
        out += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return out
