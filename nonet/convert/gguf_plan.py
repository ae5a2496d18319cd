"""What goes into a GGUF file before a byte of it is written: metadata, and tensors made when their turn comes.

Owns: in which type a tensor is stored, and the account of which of a directory's tensors have been used.
Invariant: a plan uses every tensor of the directory but those of parts the user named in `drop`.
Refuses, naming the tensor: missing ones, wrong shapes, values the chosen type cannot hold, and anything left over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import gguf
import numpy as np
import torch
from torch import Tensor

from nonet.convert.weights import Weights
from nonet.types import UserError

Kind = gguf.GGMLQuantizationType
Dtype = Literal["keep", "f32", "f16", "bf16"]
BYTES = {Kind.F32: 4.0, Kind.F16: 2.0, Kind.BF16: 2.0, Kind.MXFP4: 17 / 32, Kind.I64: 8.0}  # per element
CHOSEN = {"f32": Kind.F32, "f16": Kind.F16, "bf16": Kind.BF16}
STORED = {"BF16": Kind.BF16, "F16": Kind.F16, "F32": Kind.F32, "F64": Kind.F32}
DROPPABLE = {  # what a user may leave out on purpose, and how its tensors are recognised
    "mtp": "the multi-token prediction layer",
    "vision": "the vision tower",
}
VISION = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class Options:
    """dtype: of all that is neither packed nor needed in float32. unpack: decode MXFP4 experts (exact in f32 and bf16).
    drop: parts to leave out. pre: llama.cpp's name of the pre-tokenizer, instead of the one found.
    """

    dtype: Dtype = "keep"
    unpack: bool = False
    drop: frozenset[str] = frozenset()
    pre: str = ""


@dataclass(frozen=True)
class Item:
    """A tensor of the file. `load` makes its bytes as an array of `nbytes`; shape is rows first."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    load: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return round(prod(self.shape) * BYTES[self.kind])


@dataclass(frozen=True)
class Plan:
    """architecture is general.architecture; metadata keys are whole ("llama.block_count")."""

    architecture: str
    metadata: dict[str, Any]
    items: list[Item]


@dataclass
class Builder:
    """Collects items, and remembers which tensors of `weights` they come from."""

    weights: Weights
    options: Options
    items: list[Item] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def add(
        self,
        name: str,
        source: str,
        shape: tuple[int, ...],
        change: Callable[[Tensor], Tensor] | None = None,
        out: tuple[int, ...] | None = None,
        exact: bool = False,
    ) -> None:
        """One tensor `source` of `shape` under `name`, put through `change` (which makes it `out`).

        exact: float32 whatever the option, because llama.cpp computes with it in float32 (norms, biases, routers).
        """
        self.take(source, shape)
        out = out or shape
        kind = Kind.F32 if exact or len(out) == 1 else self.kind(source)

        def load() -> np.ndarray:
            tensor = self.weights.read(source)
            return stored(tensor if change is None else change(tensor), kind, source)

        self.items.append(Item(name, out, kind, load))

    def take(self, source: str, shape: tuple[int, ...]) -> None:
        """Claim a tensor of the directory, which must have this shape."""
        entry = self.weights.entry(source)
        if entry.shape != shape:
            raise UserError(
                f"{entry.file}: {source} has shape {list(entry.shape)}, needs {list(shape)}: "
                "correct config.json or replace the weights"
            )
        self.used.add(source)

    def kind(self, source: str) -> Kind:
        """The type a tensor gets by the options."""
        if self.options.dtype != "keep":
            return CHOSEN[self.options.dtype]
        entry = self.weights.entry(source)
        if entry.dtype not in STORED:
            raise UserError(
                f"{entry.file}: {source} is stored as {entry.dtype}; convert it to one of {', '.join(STORED)}"
            )
        return STORED[entry.dtype]

    def leave(self, names: Iterable[str]) -> None:
        """Tensors that need not be written because the file says the same without them."""
        self.used.update(names)

    def finish(self, layers: int) -> list[Item]:
        """All items, after making sure that nothing of the directory is forgotten."""
        left = [name for name in self.weights if name not in self.used]
        for part, about in DROPPABLE.items():
            here = [name for name in left if _part(name, layers) == part]
            if here and part not in self.options.drop:
                raise UserError(
                    f"{self.weights.directory}: {about} ({here[0]} and {len(here) - 1} more) has no place in this "
                    f"architecture of GGUF; leave it out on purpose with --drop {part}"
                )
            left = [name for name in left if name not in here]
        if left:
            raise UserError(
                f"{self.weights.directory}: {len(left)} tensors have no place in this architecture of GGUF, "
                f"the first is {left[0]}; correct config.json or replace the weights"
            )
        return self.items


def _part(name: str, layers: int) -> str | None:
    if name.startswith(VISION):
        return "vision"
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return "mtp" if match and int(match[1]) >= layers else None


def stored(tensor: Tensor, kind: Kind, source: str) -> np.ndarray:
    """The tensor's values in a storage type, contiguous. Refuses values that float16 or bfloat16 turn into infinity."""
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    cast = tensor.to(dtype).contiguous()
    if not torch.isfinite(cast).all():
        raise UserError(f"dtype = {kind.name.lower()}: {source} has values that are not finite in it; use bf16 or f32")
    return cast.view(torch.int16).numpy() if kind == Kind.BF16 else cast.numpy()
