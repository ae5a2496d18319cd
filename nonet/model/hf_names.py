"""What the tensors of a model directory are called, how they are shaped, and which of our parameters they hold.

    ours                                  on disk, under model.layers.{i}. of a layer
    layers.{i}.mlp.* of a MoE layer       block_sparse_moe.*
    mlp.experts.w1, .w3, .w2 [E, ...]     block_sparse_moe.experts.{e}.w1.weight, ...: one tensor for each expert, or
                                          .weight_packed and .weight_scale where they are MXFP4
    self_attention_res.norm, .proj        self_attention_res_norm, self_attention_res_proj (also mlp_res, and
                                          model.output_attn_res)
    self_attn.A_log [H]                   [ceil(H / 128) * 128], zeros behind, in K3; [1, 1, H, 1] in Kimi-Linear
    mtp.*                                 layer L, the index after the last; its norm is shared_head.norm

kimi_k3 puts PREFIX before every name. Names here are bare: without it, and as published where others differ: what
transformers saves calls a dense layer's mlp block_sparse_moe too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nonet.model.config import ModelConfig
from nonet.model.hf_config import family_of
from nonet.model.hf_kimi import is_packed
from nonet.model.model import Model

PREFIX = "language_model."
PACKED, SCALE = ".weight_packed", ".weight_scale"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.w([123])")
_DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)")
_A_LOG_PAD = 128
# K3 stores these in float32 whatever the rest is: exponents, decisions between near equals, the norm of a KDA head.
_WIDE = (".A_log", ".dt_bias", ".e_score_correction_bias", ".self_attn.o_norm.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor on disk: our parameter it holds, its shape there, which expert of the stack it is (None: all of it),
    and for A_log how many of its values count.
    """

    parameter: str
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be read; A_log in any of its spellings."""
        spellings = () if self.heads is None else _a_log(self.heads)
        return shape == self.shape or shape in spellings


class _NoInit(TorchFunctionMode):
    """Skips torch.nn.init, which on the meta device would do nothing but import torch's compiler for a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def empty(config: ModelConfig) -> Model:
    """The model's skeleton on the meta device: shapes, no memory, no initialisation."""
    with torch.device("meta"), _NoInit():
        return Model(config)


def prefix_of(config: ModelConfig) -> str:
    """What a directory of this config puts before every name."""
    return PREFIX if family_of(config) == "kimi_k3" else ""


def places(config: ModelConfig) -> dict[str, Place]:
    """Bare name -> Place of every tensor a directory of this config must hold, in file order."""
    out: dict[str, Place] = {}
    shapes = {name: tuple(p.shape) for name, p in empty(config).named_parameters()}
    spelling = 1 if family_of(config) == "kimi_linear" else 2
    for name, shape in shapes.items():
        if match := _EXPERTS.fullmatch(name):
            if match[2] == "1":
                out.update(_experts(match[1], shapes, config))
        elif name.endswith(".A_log"):
            out[hf_name(name, config)] = Place(name, _a_log(shape[0])[spelling], heads=shape[0])
        else:
            out[hf_name(name, config)] = Place(name, shape)
    return out


def _a_log(heads: int) -> tuple[tuple[int, ...], ...]:
    """Its three spellings: plain, Kimi-Linear's, K3's."""
    return (heads,), (1, 1, heads, 1), (-(-heads // _A_LOG_PAD) * _A_LOG_PAD,)


def _experts(stack: str, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> Iterator[tuple[str, Place]]:
    """Expert by expert, so that all of one lies together."""
    name = hf_name(stack, config)
    kinds: list[tuple[str, str, tuple[int, ...]]] = []  # (end of the name, parameter, shape)
    for part in ("w1", "w2", "w3"):
        _, rows, columns = shapes[f"{stack}.{part}"]
        forms = {PACKED: (rows, columns // 2), SCALE: (rows, columns // 32)}
        for end, shape in forms.items() if is_packed(config) else [(".weight", (rows, columns))]:
            kinds.append((f".{part}{end}", f"{stack}.{part}", shape))
    for e in range(shapes[f"{stack}.w1"][0]):
        for end, parameter, shape in kinds:
            yield f"{name}.{e}{end}", Place(parameter, shape, e)


def hf_name(name: str, config: ModelConfig) -> str:
    """The bare name on disk of a parameter that is stored whole (or of a module).

    >>> config = ModelConfig(vocab_size=9, d_model=8, layers=4, d_ff=8, heads=1)
    >>> hf_name("mtp.block.mlp.up_proj.weight", config), hf_name("mtp.norm.weight", config)
    ('model.layers.4.mlp.up_proj.weight', 'model.layers.4.shared_head.norm.weight')
    """
    name = re.sub(r"(self_attention_res|mlp_res|output_attn_res)\.(norm|proj)", r"\1_\2", name)
    if name.startswith("mtp."):
        part = name.removeprefix("mtp.").removeprefix("block.")
        name = f"layers.{config.layers}.{'shared_head.' if part.startswith('norm.') else ''}{part}"
    if (match := re.match(r"layers\.(\d+)\.mlp\.", name)) and config.is_moe(int(match[1])):
        name = f"layers.{match[1]}.block_sparse_moe.{name[match.end() :]}"
    return name if name == HEAD else f"model.{name}"


def bare(name: str) -> str:
    """A name as a file has it, in our spelling.

    >>> bare("language_model.model.layers.0.block_sparse_moe.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return _DENSE.sub(r".mlp.\1", name.removeprefix(PREFIX))


def copies(config: ModelConfig) -> dict[str, str]:
    """Bare name -> the tensor it must equal: what a directory may spell out twice."""
    head = EMBED if config.tie_embeddings else HEAD
    out = {HEAD: EMBED} if config.tie_embeddings else {}
    if config.mtp_layers:
        mtp = f"model.layers.{config.layers}."
        out |= {f"{mtp}embed_tokens.weight": EMBED, f"{mtp}shared_head.head.weight": head}
    return out


def written_copies(config: ModelConfig) -> dict[str, str]:
    """Those copies that must be written: transformers' kimi_linear never ties its head."""
    return {HEAD: EMBED} if config.tie_embeddings and family_of(config) == "kimi_linear" else {}


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a directory of this config, as `save` writes it."""
    prefix, found = prefix_of(config), places(config)
    out = {prefix + name: place.shape for name, place in found.items()}
    return out | {prefix + copy: found[original].shape for copy, original in written_copies(config).items()}


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """In what a tensor is written when the model is written in `dtype`."""
    return torch.float32 if name.endswith(_WIDE) and dtype in (torch.bfloat16, torch.float16) else dtype
