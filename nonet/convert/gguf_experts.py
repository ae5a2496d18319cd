"""The routed experts of a layer as three stacked GGUF tensors.

Owns: the choice between plain and MXFP4-packed experts, by what the directory holds. Invariant: packed codes and scales
arrive unchanged in the file's MXFP4 blocks, or, with `unpack`, as the very numbers they stand for.
Refuses: layers that hold some experts packed and some not, and packed experts under a scheme that is not K3's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nonet.convert.gguf_plan import CHOSEN, Builder, Item, Kind, stored
from nonet.convert.k3_shape import K3Shape, text_config
from nonet.quant import decode, pack
from nonet.types import UserError

PARTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def add_experts(b: Builder, s: K3Shape, layer: int) -> None:
    """Claim every expert of a layer and plan its three tensors."""
    ours = f"model.layers.{layer}.block_sparse_moe.experts."
    width = s.latent or s.d_model
    for part, theirs in PARTS.items():
        shape = (width, s.expert_ff) if part == "w2" else (s.expert_ff, width)
        names = [f"{ours}{e}.{part}" for e in range(s.experts)]
        held = sum(f"{name}.weight_packed" in b.weights for name in names)
        if held not in (0, s.experts):
            raise UserError(
                f"{b.weights.directory}: {ours}*.{part} are packed in {held} of {s.experts} experts; pack all or none"
            )
        name = f"blk.{layer}.{theirs}.weight"
        b.items.append(_packed(b, name, names, shape) if held else _plain(b, name, names, shape))


def check_scheme(b: Builder) -> None:
    """A directory with packed tensors must say how they are packed, and it must be the one way we know."""
    packed = next((name for name in b.weights if name.endswith(".weight_packed")), None)
    config = text_config(b.weights.directory).get("quantization_config")
    file = b.weights.directory / "config.json"
    if config is not None:
        pack.read_config(config, f"{file}: quantization_config")
    elif packed is not None:
        raise UserError(f"{file}: quantization_config is missing although {packed} is packed; add it")


def _plain(b: Builder, name: str, names: list[str], shape: tuple[int, ...]) -> Item:
    for source in names:
        b.take(f"{source}.weight", shape)
    kind = b.kind(f"{names[0]}.weight")

    def load() -> np.ndarray:
        return _stacked((stored(b.weights.read(f"{source}.weight"), kind, source) for source in names), len(names))

    return Item(name, (len(names), *shape), kind, load)


def _packed(b: Builder, name: str, names: list[str], shape: tuple[int, ...]) -> Item:
    rows, columns = shape
    if columns % 32:
        raise UserError(f"{b.weights.directory}: {names[0]} has {columns} columns; MXFP4 packs blocks of 32")
    for source in names:
        b.take(f"{source}.weight_packed", (rows, columns // 2))
        b.take(f"{source}.weight_scale", (rows, columns // 32))
    # bfloat16 holds every MXFP4 number but those of blocks at the ends of its range, which `stored` would refuse.
    chosen = CHOSEN.get(b.options.dtype, Kind.BF16)
    kind = chosen if b.options.unpack else Kind.MXFP4

    def load() -> np.ndarray:
        return _stacked((_codes(b, source, kind) for source in names), len(names))

    return Item(name, (len(names), *shape), kind, load)


def _codes(b: Builder, source: str, kind: Kind) -> np.ndarray:
    packed, scale = b.weights.read(f"{source}.weight_packed"), b.weights.read(f"{source}.weight_scale")
    mx = pack.unpack(packed, scale, f"{source}.weight")
    if kind == Kind.MXFP4:
        return pack.to_gguf(mx, f"{source}.weight").numpy()
    values: Tensor = decode(mx, torch.float32)
    return stored(values, kind, source)


def _stacked(arrays: Iterator[np.ndarray], count: int) -> np.ndarray:
    """np.stack, with one of the arrays held at a time: all experts of a K3 layer are gigabytes."""
    first = next(arrays)
    out = np.empty((count, *first.shape), first.dtype)
    out[0] = first
    for i, array in enumerate(arrays, 1):
        out[i] = array
    return out
