"""Hugging Face directories in and out: config.json and safetensors, one file or sharded.

Owns: tensor names on disk, the audit of a directory against its config, and the writing of shards. Invariant: a model
is loaded whole or not at all, and save then load is bitwise the same model. Refuses, naming file and tensor: anything
missing, surplus, wrongly shaped, not finite or unreadable.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nonet.model.config import ModelConfig
from nonet.model.hf_config import from_json, read_json, to_json, write_json
from nonet.model.model import Model
from nonet.types import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)
_RECOMPUTED = ".rotary_emb.inv_freq"  # a buffer that old transformers versions saved and every version recomputes


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies and what it is, from a file's header alone."""

    file: Path
    shape: tuple[int, ...]
    dtype: str = "F32"


# ---------------------------------------------------------------- public API


def read_config(directory: Path | str) -> ModelConfig:
    """The dimensions of a model directory, without touching its weights."""
    file = Path(directory) / "config.json"
    return from_json(read_json(file), file)


def load(directory: Path | str, dtype: torch.dtype = torch.float32) -> Model:
    """The model in a directory, its parameters in `dtype` on the CPU."""
    config = read_config(directory)
    model = empty(config)
    ours = {hf: mine for mine, hf in _names(model)}
    for name, tensor in stored(directory, config, dtype):
        module, _, leaf = ours[name].rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor))
    if config.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def save(
    model: Model, directory: Path | str, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write config.json and weights (in `dtype`, or as they are); tokenizer files are the caller's (copy_tokenizer)."""
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters())
    kind = dtype or model.embed_tokens.weight.dtype
    tensors = ((hf, parameters[mine].detach()) for mine, hf in _names(model))
    pairs = ((hf, checked(tensor.to("cpu", dtype or tensor.dtype), hf, out)) for hf, tensor in tensors)
    write_weights(pairs, out, max_shard_bytes)
    write_json(out / "config.json", to_json(model.config) | {"torch_dtype": str(kind).removeprefix("torch.")})


def copy_tokenizer(source: Path | str, target: Path | str) -> list[str]:
    """Copy the tokenizer's files, generation_config.json (its stop ids) among them; returns their names."""
    names = [name for name in TOKENIZER_FILES if (Path(source) / name).exists()]
    if "tokenizer.json" not in names:
        raise UserError(f"{Path(source) / 'tokenizer.json'}: no such file; name a directory that holds a tokenizer")
    for name in names:
        shutil.copyfile(Path(source) / name, Path(target) / name)
    return names


# --------------------------------------------------------------------- names


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


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor a directory of this config holds."""
    model = empty(config)
    parameters = dict(model.named_parameters())
    return {hf: tuple(parameters[mine].shape) for mine, hf in _names(model)}


def _names(model: Model) -> list[tuple[str, str]]:
    """(our parameter, Hugging Face tensor), in file order; a tied head has no tensor of its own."""
    return [(name, hf_name(name, model.config.layers)) for name, _ in model.named_parameters()]


def hf_name(name: str, layers: int) -> str:
    """The name on disk; the MTP layer takes the index after the last layer (the DeepSeek and K3 layout).

    >>> hf_name("mtp.block.mlp.up_proj.weight", 4), hf_name("mtp.norm.weight", 4)
    ('model.layers.4.mlp.up_proj.weight', 'model.layers.4.shared_head.norm.weight')
    """
    if name.startswith("mtp."):
        part = name.removeprefix("mtp.").removeprefix("block.")
        return f"model.layers.{layers}.{'shared_head.' if part.startswith('norm.') else ''}{part}"
    return name if name.startswith("lm_head.") else f"model.{name}"


# --------------------------------------------------------------------- audit


def audit(found: Mapping[str, Entry], config: ModelConfig, where: Path | str) -> None:
    """Refuse a set of tensors that is not exactly what the config describes, naming every one that differs."""
    wanted = expected(config)
    missing = [name for name in wanted if name not in found]
    surplus = [(name, found[name].file.name) for name in found if name not in wanted]
    wrong = [
        (name, f"has shape {list(e.shape)} in {e.file.name}, needs {list(wanted[name])}")
        for name, e in found.items()
        if name in wanted and e.shape != wanted[name] and not _padded_A_log(name, e.shape, wanted[name])
    ]
    problems = [
        *(f"lacks {name}" for name, _ in _ranges((name, "") for name in missing)),
        *(f"has surplus {name} in {file}" for name, file in _ranges(surplus)),
        *(f"{name} {what}" for name, what in _ranges(wrong)),
    ]
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}: correct config.json or replace the weights")


def _padded_A_log(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """K3 stores A_log filled up with zeros to a multiple of 128."""
    return name.endswith(".A_log") and len(found) == 1 and found[0] == -(-wanted[0] // 128) * 128


def _ranges(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names that differ only in the layer, folded: model.layers.{0-29}.mlp.up_proj.weight."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, detail in pairs:
        match = re.fullmatch(r"(model\.layers\.)(\d+)(\..+)", name)
        key = (match[1], match[3], detail) if match else (name, "", detail)
        groups.setdefault(key, []).append(int(match[2]) if match else -1)
    return [(f"{head}{_spans(layers)}{tail}", detail) for (head, tail, detail), layers in groups.items()]


def _spans(layers: list[int]) -> str:
    if layers == [-1]:
        return ""
    spans: list[list[int]] = []
    for i in sorted(layers):
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return text if len(layers) == 1 else f"{{{text}}}"


# ------------------------------------------------------------------- reading


def stored(
    directory: Path | str, config: ModelConfig, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a directory once, audited as a whole first and each checked to be finite.

    dtype None keeps what is stored. One converted tensor exists at a time beside those the caller keeps.
    """
    directory = Path(directory)
    found = {name: e for name, e in _headers(directory).items() if not name.endswith(_RECOMPUTED)}
    for name, e in found.items():
        if e.dtype not in DTYPES:
            raise UserError(f"{e.file}: {name} is stored as {e.dtype}; convert it to one of {', '.join(DTYPES)}")
    if config.tie_embeddings:
        _drop_tied_head(found)
    audit(found, config, directory)
    shapes = expected(config)
    for file in dict.fromkeys(e.file for e in found.values()):
        with _open(file) as shard:
            for name in (n for n, e in found.items() if e.file == file):
                tensor = _unpadded(shard.get_tensor(name), shapes[name], name, file)
                yield name, checked(tensor.to(dtype or tensor.dtype, copy=True), name, file)


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


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file}: truncated or not a safetensors file ({e}); copy it again") from e


def _headers(directory: Path) -> dict[str, Entry]:
    """Name -> Entry of every tensor in the directory's weight files."""
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise UserError(f"{directory}: holds both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.exists():
        return _header(single)
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
        for tensor, entry in _header(directory / name).items():
            if placed.get(tensor) != name:
                raise UserError(f"{directory / name}: holds {tensor}, which {INDEX} places in {placed.get(tensor)}")
            found[tensor] = entry
    for tensor in placed.keys() - found.keys():
        raise UserError(f"{directory / placed[tensor]}: lacks {tensor}, which {INDEX} places there; copy it again")
    return found


def _header(file: Path) -> dict[str, Entry]:
    with _open(file) as f:
        slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
        return {name: Entry(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _drop_tied_head(found: dict[str, Entry]) -> None:
    """A tied model may still spell out its head; it must then be the embedding."""
    head, embed = found.get("lm_head.weight"), found.get("model.embed_tokens.weight")
    if head is None or embed is None:
        return
    with _open(head.file) as a, _open(embed.file) as b:
        if not torch.equal(a.get_tensor("lm_head.weight"), b.get_tensor("model.embed_tokens.weight")):
            raise UserError(
                f"{head.file}: lm_head.weight differs from model.embed_tokens.weight although config.json says "
                f"tie_word_embeddings = true; set it to false"
            )
    del found["lm_head.weight"]


def _unpadded(tensor: Tensor, shape: tuple[int, ...], name: str, file: Path) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    if tensor[shape[0] :].any():
        raise UserError(f"{file}: {name} has non-zero values beyond its {shape[0]} heads; replace the file")
    return tensor[: shape[0]]


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
