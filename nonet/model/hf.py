"""Hugging Face directories in and out: config.json and safetensors, one file or sharded.

Owns: the reading and writing of whole models; what tensors are called (hf_names.py), which files hold them
(hf_files.py), how routed experts are packed (hf_experts.py), whether all are there (hf_audit.py) and what config.json
says (hf_config.py) are beside it. Invariant: a model is loaded whole or not at all, and save then load is bitwise the
same model, experts in MXFP4 aside, which come back as the numbers their codes stand for. Refuses, naming file and
tensor: anything missing, surplus, wrongly shaped, not finite or unreadable.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from nonet.model.config import ModelConfig
from nonet.model.hf_audit import audit, compare
from nonet.model.hf_config import from_json, read_json, to_json, write_json
from nonet.model.hf_experts import Stacks, packed_expert
from nonet.model.hf_files import DTYPES, INDEX, SINGLE, Entry, checked, headers, open_shard, read, write_weights
from nonet.model.hf_names import (
    HEAD,
    PACKED,
    PREFIX,
    SCALE,
    Place,
    bare,
    copies,
    empty,
    expected,
    hf_name,
    places,
    prefix_of,
    stored_dtype,
    written_copies,
)
from nonet.model.model import Model
from nonet.quant import pack
from nonet.types import UserError

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "TOKENIZER_FILES",
    "Entry",
    "audit",
    "checked",
    "copy_tokenizer",
    "empty",
    "expected",
    "hf_name",
    "load",
    "read_config",
    "read_json",
    "save",
    "stored",
    "write_json",
    "write_weights",
]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)
_RECOMPUTED = ".rotary_emb.inv_freq"  # a buffer that old transformers versions saved and every version recomputes


def read_config(directory: Path | str) -> ModelConfig:
    """The dimensions of a model directory, without touching its weights."""
    file = Path(directory) / "config.json"
    return from_json(read_json(file), file)


def copy_tokenizer(source: Path | str, target: Path | str) -> list[str]:
    """Copy the tokenizer's files, generation_config.json (its stop ids) among them; returns their names."""
    names = [name for name in TOKENIZER_FILES if (Path(source) / name).exists()]
    if "tokenizer.json" not in names:
        raise UserError(f"{Path(source) / 'tokenizer.json'}: no such file; name a directory that holds a tokenizer")
    for name in names:
        shutil.copyfile(Path(source) / name, Path(target) / name)
    return names


# ------------------------------------------------------------------- reading


def load(directory: Path | str, dtype: torch.dtype = torch.float32) -> Model:
    """The model in a directory, in eval mode, parameters in `dtype` on the CPU. Experts are stacked as they come."""
    config = read_config(directory)
    model = empty(config)
    stacks = Stacks(model, dtype)
    for name, place, tensor in _tensors(Path(directory), config, dtype):
        if place.expert is not None:
            stacks.put(name, place, tensor, directory)
            continue
        module, _, leaf = place.parameter.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=getattr(owner, leaf).requires_grad))
    if config.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def stored(
    directory: Path | str, config: ModelConfig, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a directory once, named and shaped as `save` would write it, whichever spelling the directory
    uses. The directory is audited as a whole first, and each tensor checked to be finite.

    dtype None keeps what is stored; packed experts keep their codes whatever it is. One converted tensor exists at a
    time beside those the caller keeps.
    """
    prefix, copied = prefix_of(config), {original: copy for copy, original in written_copies(config).items()}
    for name, place, tensor in _tensors(Path(directory), config, dtype):
        yield prefix + name, tensor if place.heads is None else _padded(tensor, place.shape)
        if name in copied:
            yield prefix + copied[name], tensor.clone()


def _tensors(directory: Path, config: ModelConfig, dtype: torch.dtype | None) -> Iterator[tuple[str, Place, Tensor]]:
    """(bare name, place, tensor) of a whole and sound directory, one file after another; A_log as [H]."""
    found, prefix = _found(directory)
    wanted = places(config)
    _refuse_types(found, wanted)
    _drop_copies(found, config)
    compare(found, wanted, directory, prefix)
    by_file: dict[Path, list[str]] = {}
    for name, entry in found.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        with open_shard(file) as shard:
            for name in names:
                tensor, place = shard.get_tensor(found[name].name), wanted[name]
                if place.heads is not None:
                    tensor = _heads(tensor, place.heads, name, file)
                if tensor.is_floating_point():
                    tensor = checked(tensor.to(dtype or tensor.dtype, copy=True), name, file)
                yield name, place, tensor


def _found(directory: Path) -> tuple[dict[str, Entry], str]:
    """(bare name -> Entry, the prefix the directory's text tensors bear), without buffers that everyone recomputes."""
    out: dict[str, Entry] = {}
    stored = {name: e for name, e in headers(directory).items() if not name.endswith(_RECOMPUTED)}
    for name, entry in stored.items():
        known = bare(name)
        if known in out:
            raise UserError(f"{directory}: holds both {out[known].name} and {name}, which are the same; remove one")
        out[known] = entry
    return out, PREFIX if any(name.startswith(PREFIX) for name in stored) else ""


def _refuse_types(found: dict[str, Entry], wanted: dict[str, Place]) -> None:
    for name, e in found.items():
        packed = name.endswith((PACKED, SCALE))
        if name in wanted and e.dtype not in (("U8",) if packed else DTYPES):
            fix = f"{pack.FORMAT} stores U8" if packed else f"convert it to one of {', '.join(DTYPES)}"
            raise UserError(f"{e.file}: {e.name} is stored as {e.dtype}; {fix}")


def _drop_copies(found: dict[str, Entry], config: ModelConfig) -> None:
    """What a directory spells out twice must be the same both times."""
    for copy, original in copies(config).items():
        if copy not in found or original not in found:
            continue
        one, other = read(found[copy]), read(found[original])
        if one.shape != other.shape or not bool((one == other).all()):
            why = "although config.json says tie_word_embeddings = true; set it to false"
            if copy != HEAD:
                why = "although an MTP layer shares the model's own; use weights in which it does"
            raise UserError(f"{found[copy].file}: {found[copy].name} differs from {found[original].name} {why}")
        del found[copy]


def _heads(tensor: Tensor, heads: int, name: str, file: Path) -> Tensor:
    """A_log as [H], from any of its spellings; K3 fills it up with zeros."""
    flat = tensor.flatten()
    if flat[heads:].any():
        raise UserError(f"{file}: {name} has non-zero values beyond its {heads} heads; replace the file")
    return flat[:heads]


# ------------------------------------------------------------------- writing


def save(
    model: Model, directory: Path | str, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write config.json and weights; tokenizer files are the caller's (copy_tokenizer).

    Weights are written in `dtype`, or as they are; routed experts of an MXFP4 model as its codes, and what K3 keeps in
    float32 beside bfloat16 weights in float32 (hf_names.stored_dtype).
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    kind = dtype or model.embed_tokens.weight.dtype
    write_weights(_written(model, dtype, out), out, max_shard_bytes)
    write_json(out / "config.json", to_json(model.config) | {"torch_dtype": str(kind).removeprefix("torch.")})


def _written(model: Model, dtype: torch.dtype | None, out: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the directory, made when its turn comes."""
    config, parameters = model.config, dict(model.named_parameters())
    prefix, found = prefix_of(config), places(config)
    scales = torch.empty(0)
    for name, place in found.items():
        parameter = parameters[place.parameter]
        if name.endswith(PACKED):
            assert config.quant is not None and place.expert is not None
            checked(parameter.detach()[place.expert], name, out)
            packed, scales = pack.pack(packed_expert(parameter, place.expert, config.quant))
            yield prefix + name, packed
        elif name.endswith(SCALE):
            yield prefix + name, scales  # of the codes just written
        else:
            yield prefix + name, _plain(parameter, name, place, dtype, out)
    for copy, original in written_copies(config).items():
        place = found[original]
        yield prefix + copy, _plain(parameters[place.parameter], copy, place, dtype, out).clone()


def _plain(parameter: Tensor, name: str, place: Place, dtype: torch.dtype | None, out: Path) -> Tensor:
    tensor = parameter.detach()
    if place.expert is not None:
        tensor = tensor[place.expert]
    kind = tensor.dtype if dtype is None else stored_dtype(name, dtype)
    tensor = checked(tensor.to("cpu", kind), name, out)
    return tensor if place.heads is None else _padded(tensor, place.shape)


def _padded(A_log_H: Tensor, shape: tuple[int, ...]) -> Tensor:
    """In the spelling of its family."""
    out = A_log_H.new_zeros(shape)
    out.view(-1)[: len(A_log_H)] = A_log_H
    return out
