"""Models to save, breaking their directories on purpose, and the sentence that `load` then refuses with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from nonet.model import Model, hf
from nonet.quant import QuantConfig
from nonet.types import UserError

PACKABLE = dict(experts=6, top_k=2, d_ff=32, shared=2, latent=64)


def packed_model(**over: Any) -> Model:
    return tiny.model("k3", **{"moe": PACKABLE, "quant": QuantConfig(), "mtp_layers": 1, **over})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, signed zeros included."""
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert tensor.numpy().tobytes() == b[name].numpy().tobytes(), name


def refusal(directory: Path, *parts: str) -> str:
    """The sentence `load` refuses with; it must contain every part and be one line."""
    with pytest.raises(UserError) as caught:
        hf.load(directory)
    sentence = str(caught.value)
    for part in parts:
        assert part in sentence
    assert "\n" not in sentence
    return sentence


def edit_config(directory: Path, **fields: Any) -> None:
    """Change fields of config.json: of the text model, where it is nested. `a__b` reaches into table a."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    for key, value in fields.items():
        *tables, leaf = key.split("__")
        table = raw.get("text_config", raw)
        for name in tables:
            table = table[name]
        table[leaf] = value
    file.write_text(json.dumps(raw))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def tensors(directory: Path) -> dict[str, Tensor]:
    """Everything in a directory's weight files."""
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}
