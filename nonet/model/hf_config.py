"""config.json in and out: the Hugging Face fields of llama, qwen2, qwen3, kimi_linear and kimi_k3 <-> ModelConfig.

A config is written as the standard family that computes exactly its maths, and as kimi_k3 if none does. What the
standard keys of a family cannot say (a field the family has no key for, or a default it spells out) is kept under
"nonet", beside them. Invariant: from_json(to_json(c)) == c for every ModelConfig. Refuses, naming field and value: any
setting that would change the maths and that the model does not implement. The families are in hf_decoder.py and
hf_kimi.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet.config import build, merge
from nonet.model import hf_decoder, hf_kimi
from nonet.model.config import ModelConfig
from nonet.types import UserError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **hf_kimi.ARCHITECTURE,
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one sentence about why not."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise UserError(f"{path}: no such file; a model directory needs {path.name}") from e
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not readable as JSON ({e}); replace the file") from e
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}, not an object; replace the file")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def from_json(raw: Mapping[str, Any], file: Path | str) -> ModelConfig:
    """The ModelConfig a config.json describes; `file` is only for messages."""
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        raise UserError(
            f"{file}: model_type = {family!r} (architectures = {raw.get('architectures')}) is not implemented; "
            f"use a model of type {', '.join(ARCHITECTURES)}"
        )
    text, inside = hf_kimi.text_table(raw, file)
    kimi = family in hf_kimi.ARCHITECTURE
    values = hf_kimi.read(text, file, inside) if kimi else hf_decoder.read(text, str(family), file)
    ours = text.get("nonet", {})
    if not isinstance(ours, Mapping):
        raise UserError(f"{file}: {inside}nonet = {ours!r}: must be an object of model fields; remove or correct it")
    try:
        return build(ModelConfig, merge(values, ours))
    except UserError as e:
        raise UserError(f"{file}: {e}") from e


def family_of(config: ModelConfig) -> str:
    """The standard family whose maths this is; kimi_k3, which holds everything, if none."""
    if family := hf_decoder.family(config):
        return family
    return "kimi_linear" if hf_kimi.is_kimi_linear(config) else "kimi_k3"


def to_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json whose standard keys say all that other software needs."""
    family = family_of(config)
    if family in hf_kimi.ARCHITECTURE:
        out = hf_kimi.write(config, family)
    else:
        head = {"architectures": [ARCHITECTURES[family]], "model_type": family}
        out = {**head, **hf_decoder.write(config, family)}
    read, whole = from_json(out, "config.json").model_dump(mode="json"), config.model_dump(mode="json")
    if unsaid := _difference(whole, read):
        text = out.get("text_config", out)
        text["nonet"] = {**text.get("nonet", {}), **unsaid}
    return out


def _difference(whole: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What must be merged into `said` to make it `whole`.

    >>> _difference({"a": 1, "t": {"b": 2, "c": 3}}, {"a": 1, "t": {"b": 2, "c": 4}})
    {'t': {'c': 3}}
    """
    out: dict[str, Any] = {}
    for key, value in whole.items():
        if isinstance(value, Mapping) and isinstance(said[key], Mapping):
            if inner := _difference(value, said[key]):
                out[key] = inner
        elif value != said[key]:
            out[key] = value
    return out
