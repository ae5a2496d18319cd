"""An EAGLE-3 draft as somebody published it, and what one reader makes of it.

A directory says less than it seems to: which hidden states it wants, where norms stand and whose embedding counts are
read differently by each engine (drafts sections 4.1, 4.2). A `Reading` is one answer to all of these; `draft_of` turns
it into a `Draft` that computes exactly that, so that two readings can be compared by their logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.draft.config import DraftConfig, Fingerprint
from nonet.draft.model import Draft
from nonet.model import Model, ModelConfig
from nonet.model.hf_config import from_json, read_json
from nonet.model.hf_files import Entry, checked, headers, read
from nonet.types import UserError

MAP, EMBED, HEAD = "d2t", "embed_tokens.weight", "lm_head.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")
# Older names of the same tensors.
_RENAMED = {
    "midlayer.": "layers.0.",
    **{f"aux_norm_{name}.": f"fc_norm.{i}." for i, name in enumerate(("low", "mid", "high"))},
}
_UNREAD = {MAP, "t2d", EMBED}


@dataclass(frozen=True)
class Files:
    """A directory: its config.json as it is, and its tensors' headers by their newer names."""

    folder: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]

    @staticmethod
    def of(folder: Path | str) -> Files:
        folder = Path(folder)
        config = read_json(folder / "config.json")
        return Files(folder, config, {renamed(name): entry for name, entry in headers(folder).items()})

    def tensor(self, name: str) -> Tensor:
        tensor = read(self.entries[name])
        return checked(tensor, name, self.folder) if tensor.is_floating_point() else tensor

    @property
    def speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def eagle_config(self) -> Mapping[str, Any]:
        return self.config.get("eagle_config") or {}

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """The table that describes the layer itself."""
        return self.config.get("transformer_layer_config") or {} if self.speculators else self.config


@dataclass(frozen=True)
class Reading:
    """What one reader computes.

    ids_W: target id of each row of the head, None: row i is id i. own_embedding: the directory's, not the target's.
    own_head: the directory's. silent: what is wrong without a word; loud: why the reader refuses to load it.
    """

    who: str
    taps: tuple[int, ...]
    layer: ModelConfig
    norm_output: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    ids_W: Tensor | None
    own_embedding: bool
    own_head: bool
    silent: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()

    def config(self, depth: int) -> DraftConfig:
        flags = {name: getattr(self, name) for name in FLAGS}
        words = None if self.ids_W is None else len(self.ids_W)
        return DraftConfig(
            form="eagle3", taps=self.taps, layer=self.layer, target=Fingerprint(config=""), depth=depth,
            draft_vocab=words, **flags,
        )  # fmt: skip

    def differences(self, other: Reading) -> list[str]:
        """What this reader takes otherwise than `other` does."""
        out = []
        for field in fields(self):
            if field.name in ("who", "silent", "loud", "layer", "ids_W"):
                continue
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                out.append(f"{field.name} is {_said(mine)}, meant is {_said(theirs)}")
        if not _same(self.ids_W, other.ids_W):
            out.append("the rows of the head stand for other tokens")
        for name, mine in self.layer:
            if mine != (theirs := getattr(other.layer, name)):
                out.append(f"layer.{name} is {_said(mine)}, meant is {_said(theirs)}")
        return out


class PublishedDraft(Draft):
    """A draft that may bring an embedding of its own."""

    embed_VD: Tensor | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) if self.embed_VD is None else F.embedding(tokens, self.embed_VD)


def draft_of(reading: Reading, files: Files, target: Model) -> PublishedDraft:
    """The draft as this reader computes it, in float32. UserError where tensors are missing or misshapen."""
    draft = PublishedDraft(reading.config(target.config.layers), target, reading.ids_W)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            stored = name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name
            if name == HEAD and not reading.own_head:
                weight = target.lm_head.weight
                parameter.copy_(weight if reading.ids_W is None else weight[reading.ids_W])
                continue
            tensor = _shaped(files, stored, tuple(parameter.shape))
            parameter.copy_(tensor)
    if reading.own_embedding:
        draft.embed_VD = files.tensor(EMBED).float()
    return draft.float().eval()


def wanted(reading: Reading) -> set[str]:
    """Names of the tensors that a reader needs."""
    layer = reading.layer
    linear = ["q_proj", "k_proj", "v_proj", "o_proj"]
    biased = [*(linear[:3] if layer.qkv_bias else ()), *(linear[3:] if layer.o_bias else ())]
    names = {"fc.weight", "norm.weight", *((HEAD,) if reading.own_head else ())}
    names |= {f"layers.0.self_attn.{p}.weight" for p in linear} | {f"layers.0.self_attn.{p}.bias" for p in biased}
    names |= {f"layers.0.self_attn.{p}_norm.weight" for p in "qk" if layer.qk_norm}
    names |= {f"layers.0.{p}.weight" for p in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    names |= {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    names |= {f"layers.0.mlp.{p}_proj.bias" for p in ("gate", "up", "down") if layer.mlp_bias}
    names |= {f"fc_norm.{i}.weight" for i in range(len(reading.taps)) if reading.fc_norm}
    return names | ({"input_norm.weight"} if reading.norm_before_fc else set())


def audit(reading: Reading, files: Files) -> tuple[list[str], list[str]]:
    """(names a reader needs and the directory lacks, names it holds and the reader has no place for)."""
    needs = wanted(reading)
    return sorted(needs - files.entries.keys()), sorted(files.entries.keys() - needs - _UNREAD)


def layer_of(table: Mapping[str, Any], file: Path) -> ModelConfig:
    """ModelConfig of the draft's one layer, by transformers' defaults for what is not said. UserError."""
    if table.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{file}: num_hidden_layers = {table['num_hidden_layers']}: only drafts of one layer are read")
    family = "qwen3" if table.get("model_type") == "qwen3" else "llama"
    return from_json({**table, "model_type": family, "num_hidden_layers": 1, "tie_word_embeddings": False}, file)


def renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _shaped(files: Files, name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in files.entries:
        raise UserError(f"{files.folder}: lacks {name}; the draft is not whole")
    tensor = files.tensor(name)
    if tuple(tensor.shape) != shape:
        raise UserError(f"{files.folder}: {name} has shape {list(tensor.shape)}, needs {list(shape)}")
    return tensor


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _said(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
