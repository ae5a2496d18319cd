"""LoRA adapters as PEFT writes them, in and out: adapter_config.json beside adapter_model.safetensors.

    base_model.model.{module}.lora_A.weight [r, in], .lora_B.weight [out, r]     W += scale B A, scale = alpha / r
    base_model.model.{module}.lora_embedding_A [r, V], .lora_embedding_B [D, r]  W += scale (B A)^T
    base_model.model.{module}.weight, .base_layer.weight                         W itself, before deltas are added

rank_pattern and alpha_pattern set r and alpha for modules whose name ends in a key; use_rslora makes scale
alpha / sqrt(r). Refused: what is not a plain sum of such products (DoRA, biases, transposed layers, other methods).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nonet.model.config import ModelConfig
from nonet.model.hf_config import read_json, write_json
from nonet.model.hf_files import checked, header, read
from nonet.model.hf_names import bare, empty, hf_name, places, prefix_of
from nonet.model.model import Model
from nonet.types import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# LoRA's delta = scale * product of these, in this order.
_A, _B = (".lora_A.weight", ".lora_embedding_A"), (".lora_B.weight", ".lora_embedding_B")
_PLAIN = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "lora_bias": False}


def is_adapter(directory: Path | str) -> bool:
    return (Path(directory) / CONFIG).exists()


def base_of(directory: Path | str) -> Path:
    """The model directory an adapter was made for: as its config says, from here or from beside the adapter."""
    named = _config(Path(directory)).get("base_model_name_or_path") or ""
    for found in (Path(named), Path(directory) / named):
        if named and (found / "config.json").exists():
            return found
    raise UserError(
        f"{Path(directory) / CONFIG}: base_model_name_or_path = {named!r}: no such model directory; "
        "set it to the directory the adapter was trained on"
    )


@torch.no_grad()
def merge(model: Model, directory: Path | str) -> None:
    """Add the adapter's deltas to the model's own weights, in place. UserError, naming file and tensor, for what does
    not fit it; then the model must not be used.
    """
    folder = Path(directory)
    config, file = _config(folder), folder / WEIGHTS
    if not file.exists():
        raise UserError(f"{file}: no such file; an adapter is saved as safetensors beside {CONFIG}")
    tensors = {n.removeprefix(_PREFIX): checked(read(e).float(), n, file) for n, e in header(file).items()}
    for name in sorted(tensors, key=lambda n: _split(n)[1] in _A):  # whole weights first
        tensor, (stem, end) = tensors[name], _split(name)
        if end in _B:
            continue
        weight = _weight(model, stem, name, file)
        if end in _A:
            other = name.removesuffix(end) + _B[_A.index(end)]
            if other not in tensors:
                raise UserError(f"{file}: lacks {_PREFIX}{other}; the adapter was saved in part")
            delta = _scale(config, stem, len(tensor)) * (tensors[other] @ tensor)
            weight += _fitting(delta.T if end == _A[1] else delta, weight, name, file)
        else:
            weight.copy_(_fitting(tensor, weight, name, file))


def save(
    model: ModelConfig, factors: Mapping[str, Tensor], rank: int, alpha: float, base: Path | str, directory: Path
) -> None:
    """Write factors, our names with .lora_A.weight or .lora_B.weight behind them, as an adapter of `base`."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {_published(name, model): x.contiguous() for name, x in factors.items()}
    save_file(stored, directory / WEIGHTS, metadata={"format": "pt"})
    modules = sorted({_split(name)[0].rsplit(".", 1)[-1] for name in factors})
    write_json(
        directory / CONFIG,
        {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
            "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": modules, "inference_mode": True, **_PLAIN,
        },
    )  # fmt: skip


def factors(directory: Path | str, model: ModelConfig) -> tuple[dict[str, Tensor], int, float]:
    """An adapter's factors by our names, its rank and its alpha; the inverse of `save`. UserError for an adapter whose
    layers differ in rank or scale, or that holds anything but factors of linear layers.
    """
    folder = Path(directory)
    config, file = _config(folder), folder / WEIGHTS
    for key in ("rank_pattern", "alpha_pattern", "use_rslora"):
        if config.get(key):
            raise UserError(f"{folder / CONFIG}: {key} = {config[key]!r}: training goes on from one rank and scale")
    entries = header(file)
    linear = [n for n, m in empty(model).named_modules() if isinstance(m, nn.Linear)]
    names = {_published(n + end, model): n + end for n in linear for end in (_A[0], _B[0])}
    for stored in entries:
        if stored not in names:
            raise UserError(f"{file}: {stored}: not a factor of a linear layer of this model")
    found = {names[stored]: checked(read(e).float(), stored, file) for stored, e in entries.items()}
    return found, config["r"], config["lora_alpha"]


def _published(name: str, model: ModelConfig) -> str:
    """A factor's name in the file: its layer's published name with the factor's end."""
    layer, end = _split(name)
    return _PREFIX + prefix_of(model) + hf_name(layer + ".weight", model).removesuffix(".weight") + end


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type = {config.get('peft_type')!r}: only LORA can be merged into the weights")
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise UserError(f"{file}: {key} = {config[key]!r}: not a sum of deltas; merge it with PEFT first")
    return config


def _split(name: str) -> tuple[str, str]:
    """Module and which of its tensors this is."""
    for end in (*_A, *_B, ".base_layer.weight", ".weight"):
        if name.endswith(end):
            return name.removesuffix(end), end
    return name, ""


def _weight(model: Model, stem: str, name: str, file: Path) -> nn.Parameter | Tensor:
    """The weight of a module by its published name; of a stack of experts, one's part."""
    known = places(model.config).get(bare(stem) + ".weight")
    if known is None:
        raise UserError(f"{file}: {_PREFIX}{name}: the model has no such layer; is it an adapter of another model?")
    parameter = dict(model.named_parameters())[known.parameter]
    return parameter if known.expert is None else parameter[known.expert]


def _fitting(tensor: Tensor, weight: Tensor, name: str, file: Path) -> Tensor:
    if tensor.shape != weight.shape:
        told = f"makes {list(tensor.shape)}, and the model's is {list(weight.shape)}"
        raise UserError(f"{file}: {_PREFIX}{name} {told}; is it an adapter of another model?")
    return tensor.to(weight)


def _scale(config: Mapping[str, Any], stem: str, rank: int) -> float:
    alpha = _pattern(config.get("alpha_pattern") or {}, stem, config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, Any], stem: str, default: Any) -> Any:
    """PEFT's rule: the first key that, as a regular expression, is the module's name or the end of it after a dot."""
    return next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", stem)), default)
