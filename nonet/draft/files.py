"""A draft's directory: config.json (DraftConfig) and model.safetensors, with the map of its vocabulary inside.

    eagle3   fc.weight, layers.0.*, norm.weight, lm_head.weight, fc_norm.{i}.weight, input_norm.weight
    mtp      fc.weight, model.layers.{L}.* as an MTP layer is published (model/hf_names.py), experts one by one
    d2t      [draft_vocab] int64, target id of each token the draft can say; ids here, offsets in exported files only

A draft is loaded whole or not at all, onto the target it was trained on and no other. The map is never made anew: every
row of a head would mean another token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from nonet.config import build
from nonet.draft.config import DraftConfig, Fingerprint
from nonet.draft.model import Draft
from nonet.model import Model
from nonet.model.hf_audit import fold
from nonet.model.hf_config import read_json, write_json
from nonet.model.hf_files import Entry, checked, headers, read, write_weights
from nonet.model.hf_names import places
from nonet.types import UserError

MAP = "d2t"


def save(draft: Draft, directory: Path | str, dtype: torch.dtype | None = None) -> None:
    """Write the directory; weights in `dtype`, or as they are. The target is not written, only its fingerprint."""
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    write_weights(_written(draft, dtype, out), out)
    write_json(out / "config.json", draft.config.model_dump(mode="json"))


def load(directory: Path | str, target: Model, vocabulary: str = "", dtype: torch.dtype | None = None) -> Draft:
    """The draft in a directory, for this target, in eval mode and in `dtype` (None: the target's).

    vocabulary: `vocabulary_hash` of the target's directory, where it is known. Raises UserError, naming file, tensor or
    field: another target, anything missing, surplus, wrongly shaped or not finite.
    """
    folder = Path(directory)
    config = read_config(folder)
    config.target.check(Fingerprint.of(target.config, vocabulary))
    found = headers(folder)
    d2t_W = read(found.pop(MAP)) if MAP in found and config.draft_vocab is not None else None
    draft = Draft(config, target, d2t_W)
    parameters = dict(draft.named_parameters())
    into = {
        name: parameters[parameter] if expert is None else parameters[parameter][expert]
        for name, (parameter, expert) in _names(draft).items()
    }
    _audit(folder, found, into)
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(checked(read(found[name]), name, folder))
    return draft.to(dtype or target.embed_tokens.weight.dtype).eval()


def read_config(directory: Path | str) -> DraftConfig:
    """config.json of a draft's directory; raises UserError."""
    file = Path(directory) / "config.json"
    if not file.exists():
        raise UserError(f"{file}: no such file; a draft's directory holds config.json and model.safetensors")
    return build(DraftConfig, read_json(file), str(file))


def vocabulary_hash(directory: Path | str) -> str:
    """Of the token -> id table of a model directory's tokenizer.json; raises UserError."""
    file = Path(directory) / "tokenizer.json"
    if not file.exists():
        raise UserError(f"{file}: no such file; name the target's directory, with its tokenizer")
    raw = read_json(file)
    table = {
        "vocab": raw["model"].get("vocab"),
        "added": [(t["id"], t["content"]) for t in raw.get("added_tokens", [])],
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _written(draft: Draft, dtype: torch.dtype | None, out: Path) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(draft.named_parameters())
    for name, (parameter, expert) in _names(draft).items():
        tensor = parameters[parameter].detach()
        tensor = tensor if expert is None else tensor[expert]
        yield name, checked(tensor.to("cpu", dtype or tensor.dtype), name, out).clone()
    if draft.d2t_W is not None:
        yield MAP, draft.d2t_W.cpu()


def _names(draft: Draft) -> dict[str, tuple[str, int | None]]:
    """Name on disk -> (parameter, which expert of its stack)."""
    out: dict[str, tuple[str, int | None]] = {}
    for name, _ in draft.named_parameters():
        if not name.startswith("mtp."):
            out[re.sub(r"^layer\.", "layers.0.", name)] = name, None
    if draft.config.form == "mtp":
        plain = draft.config.layer.model_copy(update={"quant": None})  # training goes on from the weights, not codes
        for name, place in places(plain).items():
            if place.parameter.startswith("mtp."):
                out[name] = place.parameter, place.expert
    return out


def _audit(folder: Path, found: Mapping[str, Entry], wanted: Mapping[str, Tensor]) -> None:
    """Refuse a set of tensors that is not exactly the draft's."""
    missing = fold((name, "") for name in wanted if name not in found)
    surplus = fold((name, "") for name in found if name not in wanted)
    wrong = [(n, e.shape) for n, e in found.items() if n in wanted and e.shape != tuple(wanted[n].shape)]
    problems = [
        *(f"lacks {name}" for name, _ in missing),
        *(f"has surplus {name}" for name, _ in surplus),
        *(f"{name} has shape {list(shape)}, needs {list(wanted[name].shape)}" for name, shape in wrong),
    ]
    if problems:
        raise UserError(f"{folder}: {'; '.join(problems)}: correct config.json or replace the weights")
