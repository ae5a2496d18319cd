"""MXFP4 codes as checkpoints store them: compressed-tensors `mxfp4-pack-quantized`, and GGUF's MXFP4 blocks.

Both layouts hold the same codes and the same E8M0 bytes, so going from one to the other moves bits and never quantises
again (ggml's own quantiser rounds ties differently). The weight [out, in] of a Linear called X is stored as

    X.weight_packed   uint8 [out, in/2]    byte j of a row: column 2j in the low nibble, column 2j+1 in the high one
    X.weight_scale    uint8 [out, in/32]   E8M0 bytes

and in a GGUF file as rows of 17-byte blocks: the E8M0 byte, then 16 bytes, of which byte j holds element j of the block
in the low nibble and element j+16 in the high one.

Owns the layouts and the `quantization_config` that announces the first. Refuses, naming the field: any scheme but
4-bit floats in groups of 32 with byte scales, weights only. Experts may be stacked: everything takes [..., out, in].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.quant.formats import BLOCK, MX, SCALE_NAN
from nonet.types import UserError

FORMAT = "mxfp4-pack-quantized"
GGUF_BYTES = 1 + BLOCK // 2
# What Kimi K3's config.json excludes: "re:" marks a regular expression matched from the start of a module's name.
K3_IGNORE = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)

# -------------------------------------------------------- compressed-tensors


def pack(mx: MX) -> tuple[Tensor, Tensor]:
    """(weight_packed uint8 [..., in/2], weight_scale uint8 [..., in/32]) of mxfp4 codes [..., in]."""
    codes = _mxfp4(mx)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), mx.scales


def unpack(weight_packed: Tensor, weight_scale: Tensor, name: str = "weight") -> MX:
    """The inverse of `pack`; `name` is what a refusal calls the tensor."""
    for suffix, tensor in (("packed", weight_packed), ("scale", weight_scale)):
        if tensor.dtype != torch.uint8:
            raise UserError(f"{name}_{suffix} is {tensor.dtype}; {FORMAT} stores uint8")
    rows, width = weight_packed.shape[:-1], 2 * weight_packed.shape[-1]
    if width % BLOCK or tuple(weight_scale.shape) != (*rows, width // BLOCK):
        shapes = f"{tuple(weight_packed.shape)} and {tuple(weight_scale.shape)}"
        raise UserError(f"{name}_packed and {name}_scale have shapes {shapes}; a scale serves 16 packed bytes")
    codes = torch.stack([weight_packed & 15, weight_packed >> 4], -1).flatten(-2)
    return MX(codes, weight_scale, "mxfp4")


def _mxfp4(mx: MX) -> Tensor:
    if mx.fmt != "mxfp4":
        raise ValueError(f"fmt = {mx.fmt!r} has eight-bit codes; only mxfp4 is packed")
    return mx.codes


# ---------------------------------------------------------------------- GGUF


def to_gguf(mx: MX, name: str = "weight") -> Tensor:
    """uint8 [..., in/32 * 17]: GGUF MXFP4 rows with these codes and scales. Refuses NaN scales, which ggml reads as
    finite numbers.
    """
    codes, scales = _mxfp4(mx).unflatten(-1, (-1, 2, BLOCK // 2)), mx.scales.unsqueeze(-1)
    if bool((scales == SCALE_NAN).any()):
        raise UserError(f"{name} has a block whose scale is NaN, which GGUF cannot say; export finite weights")
    return torch.cat([scales, codes[..., 0, :] | (codes[..., 1, :] << 4)], -1).flatten(-2)


def from_gguf(rows: Tensor, name: str = "weight") -> MX:
    """The inverse of `to_gguf`: rows uint8 [..., in/32 * 17] as a GGUF file stores them."""
    if rows.dtype != torch.uint8 or rows.shape[-1] % GGUF_BYTES:
        found = f"{rows.dtype} {tuple(rows.shape)}"
        raise UserError(f"{name} is {found}; GGUF MXFP4 rows are uint8 in blocks of {GGUF_BYTES} bytes")
    blocks = rows.unflatten(-1, (-1, GGUF_BYTES))
    scales, pairs = blocks[..., 0].contiguous(), blocks[..., 1:]
    if bool((scales == SCALE_NAN).any()):
        raise UserError(f"{name} has scale byte {SCALE_NAN}, a number to ggml and NaN to everyone else; export it anew")
    return MX(torch.cat([pairs & 15, pairs >> 4], -1).flatten(-2), scales, "mxfp4")


# ------------------------------------------------------- quantization_config


@dataclass(frozen=True, slots=True)
class Scheme:
    """A checkpoint in which each Linear is MXFP4 unless its name is ignored."""

    ignore: tuple[str, ...] = K3_IGNORE

    def covers(self, module: str) -> bool:
        """Whether the config allows the Linear of this name to be packed. K3's latent projections are covered and yet
        stored in bfloat16, so a reader asks the file whether `weight_packed` is there.
        """
        return not any(_matches(pattern, module) for pattern in self.ignore)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def config_dict(scheme: Scheme | None = None) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint packed by `pack`, as Kimi K3's config.json has it."""
    weights = {
        **{"num_bits": 4, "type": "float", "group_size": BLOCK, "strategy": "group", "symmetric": True},
        **{"scale_dtype": "torch.uint8", "observer": "minmax", "observer_kwargs": {}, "dynamic": False},
        **{"actorder": None, "block_structure": None},
    }
    group = {"format": FORMAT, "targets": ["Linear"], "weights": weights}
    return {
        **{"quant_method": "compressed-tensors", "format": FORMAT, "quantization_status": "compressed"},
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
        "ignore": list((scheme or Scheme()).ignore),
    }


# field -> the values that `pack` means by it; the rest is refused. Missing fields count as None.
TOP: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "format": (FORMAT, None),
    "quantization_status": ("compressed", "frozen", None),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
GROUP: dict[str, tuple[Any, ...]] = {
    "format": (FORMAT, None),
    "targets": (["Linear"],),
    "input_activations": (None,),
    "output_activations": (None,),
}
WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (BLOCK,),
    "strategy": ("group",),
    "symmetric": (True,),
    "scale_dtype": ("torch.uint8", "uint8", None),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
}
# say nothing about what the stored numbers mean; symmetric weights have no zero point
SILENT = {
    *("ignore", "config_groups", "weights", "version", "global_compression_ratio"),
    *("observer", "observer_kwargs", "zp_dtype"),
}


def read_config(config: Mapping[str, Any], where: str = "quantization_config") -> Scheme:
    """The scheme a `quantization_config` describes; anything but `config_dict`'s meaning is refused by field."""
    _check(config, TOP, where)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UserError(f"{where}.config_groups = {groups!r}; only one group is implemented")
    name, group = next(iter(groups.items()))
    path = f"{where}.config_groups.{name}"
    _check(group, GROUP, path)
    if FORMAT not in (config.get("format"), group.get("format")):
        raise UserError(f"{where}.format is missing; {FORMAT} is what is implemented")
    _check(group.get("weights"), WEIGHTS, f"{path}.weights")
    return Scheme(_patterns(config.get("ignore") or [], where))


def _check(table: Any, allowed: Mapping[str, tuple[Any, ...]], where: str) -> None:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} = {table!r}; must be a table")
    for key in [*allowed, *(k for k in table if k not in allowed)]:
        value = table.get(key)
        if key in SILENT or (key not in allowed and value is None):
            continue
        choices = allowed.get(key, (None,))
        if not any(value == c and type(value) is type(c) for c in choices):
            raise UserError(f"{where}.{key} = {value!r} is not implemented; use {' or '.join(map(repr, choices))}")


def _patterns(ignore: Any, where: str) -> tuple[str, ...]:
    if not isinstance(ignore, list) or not all(isinstance(p, str) for p in ignore):
        raise UserError(f"{where}.ignore = {ignore!r}; must be a list of module names and 're:' expressions")
    for pattern in ignore:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as e:
            raise UserError(f"{where}.ignore: {pattern!r} is no regular expression ({e}); correct it") from e
    return tuple(ignore)
