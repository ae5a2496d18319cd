"""The weight files of a model directory: one safetensors file, or shards with an index.

Owns: which files there are, what their headers say, and the writing of shards. Nothing but headers is read until a
tensor is asked for. Refuses, naming file and tensor: missing or truncated files, and values that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nonet.model.hf_config import read_json, write_json
from nonet.types import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies and what it is, from a file's header alone. name: what the file calls it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str = "F32"
    name: str = ""


# ------------------------------------------------------------------- reading


def headers(directory: Path) -> dict[str, Entry]:
    """Name -> Entry of every tensor in the directory's weight files."""
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise UserError(f"{directory}: holds both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.exists():
        return header(single)
    if not index.exists():
        raise UserError(f"{directory}: holds neither {SINGLE} nor {INDEX}; save the weights as safetensors")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict):
        raise UserError(f"{index}: weight_map is missing; save the model again")
    shards = sorted(set(placed.values()))
    absent = [name for name in shards if not (directory / name).exists()]
    if absent:
        raise UserError(f"{directory}: {INDEX} names missing shards {', '.join(absent)}; copy them here")
    found: dict[str, Entry] = {}
    for name in shards:
        for tensor, entry in header(directory / name).items():
            if placed.get(tensor) != name:
                raise UserError(f"{directory / name}: holds {tensor}, which {INDEX} places in {placed.get(tensor)}")
            found[tensor] = entry
    for tensor in placed.keys() - found.keys():
        raise UserError(f"{directory / placed[tensor]}: lacks {tensor}, which {INDEX} places there; copy it again")
    return found


def header(file: Path) -> dict[str, Entry]:
    with open_shard(file) as f:
        slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
        return {name: Entry(file, tuple(s.get_shape()), s.get_dtype(), name) for name, s in slices.items()}


def open_shard(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file}: truncated or not a safetensors file ({e}); copy it again") from e


def read(entry: Entry) -> Tensor:
    """One tensor as it is stored."""
    with open_shard(entry.file) as shard:
        return shard.get_tensor(entry.name)


def checked(tensor: Tensor, name: str, file: Path | str) -> Tensor:
    """The tensor itself if every value is finite."""
    finite = torch.isfinite(tensor)
    if not finite.all():
        bad = tensor.numel() - int(finite.sum())
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"{file}: {name} has {bad} non-finite of {tensor.numel()} values as {kind}; "
            f"use other weights or a wider dtype"
        )
    return tensor


# ------------------------------------------------------------------- writing


def write_weights(pairs: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """Stream tensors into model.safetensors, or into shards with an index when they exceed `max_shard_bytes`.

    At most one shard is held at a time. Earlier weights in the directory go once all new ones are written; who needs
    the whole directory to change in one step writes aside and renames it.
    """
    placed: list[dict[str, int]] = []
    for shard in _shards(pairs, max_shard_bytes):
        part = _part(directory, len(placed))
        part.touch()
        mode = part.stat().st_mode
        save_file(shard, part, metadata={"format": "pt"})
        part.chmod(mode)  # safetensors makes files that only their owner can read
        placed.append({name: t.numel() * t.element_size() for name, t in shard.items()})
    count = len(placed)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    stale = {*directory.glob("model*.safetensors"), directory / INDEX} - {directory / name for name in names}
    for i, name in enumerate(names):
        _part(directory, i).replace(directory / name)
    for path in stale:
        path.unlink(missing_ok=True)
    if count > 1:
        weight_map = {tensor: name for name, shard in zip(names, placed, strict=True) for tensor in shard}
        total = sum(sum(shard.values()) for shard in placed)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _part(directory: Path, number: int) -> Path:
    return directory / f".writing-{number:05d}.safetensors"


def _shards(pairs: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in pairs:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > limit:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.contiguous()
        held += size
    yield shard
