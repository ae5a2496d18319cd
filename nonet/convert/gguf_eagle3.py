"""A published EAGLE-3 directory -> one GGUF file that llama.cpp drafts with (`--spec-type draft-eagle3`).

Owns: the names of that architecture, and its map, which holds target ids where directories hold offsets. The vocabulary
is the target's; embedding, and head where the directory has none, are taken from the target's file while running.
Refuses: what llama.cpp's graph has no place for: other than three taps, a norm for each tap, a recycled norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.convert.gguf_decoder import metadata, permute
from nonet.convert.gguf_plan import Builder, Item, Kind, Options, Plan
from nonet.convert.gguf_vocab import vocabulary
from nonet.convert.gguf_writer import write_whole
from nonet.convert.weights import Weights
from nonet.model import hf
from nonet.model.config import ModelConfig
from nonet.model.hf_config import from_json, read_json
from nonet.types import UserError

ARCHITECTURE = "eagle3"
TAPS = 3
IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    **{f"layers.0.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in _LAYER.items()},
    **{"fc.weight": "fc.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"},
    "input_norm.weight": "enc.output_norm.weight",
}


def export_eagle3(directory: Path | str, target: Path | str, out: Path | str, dtype: str = "keep") -> Path:
    """Write the draft in `directory` (as `nonet draft export --to vllm` writes it) as the GGUF file `out`."""
    directory, target, out = Path(directory), Path(target), Path(out)
    write_whole(plan(directory, target, Options(dtype)), out)  # pyright: ignore[reportArgumentType]
    return out


def plan(directory: Path, target: Path, options: Options) -> Plan:
    raw, whole = read_json(directory / "config.json"), hf.read_config(target)
    taps = _checked(raw, directory)
    weights = Weights(directory)
    layer = from_json({**raw, "tie_word_embeddings": False}, directory / "config.json")
    keys = {
        **metadata(layer),
        "target_layers": taps,
        "target_hidden_size": whole.d_model,
        "norm_before_residual": bool(raw.get("norm_before_residual", False)),
        "norm_before_fc": bool(raw.get("norm_before_fc", False)),
    }
    builder = Builder(weights, options)
    for name in weights:
        if name in NAMES:
            _add(builder, name, layer)
    builder.leave(["d2t", "t2d"])
    items = builder.finish(1)
    if "d2t" in weights:
        items.append(_map(weights))
    general = {"general.type": "model", "general.name": directory.resolve().name}
    known = {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}
    return Plan(ARCHITECTURE, {**general, **known, **vocabulary(target, whole.vocab_size, options.pre)}, items)


def _checked(raw: Mapping[str, Any], directory: Path) -> list[int]:
    taps = raw.get(IDS)
    if not isinstance(taps, list) or len(taps) != TAPS:
        raise UserError(f"{directory}: {IDS} = {taps}: llama.cpp takes exactly {TAPS} taps; train with three")
    for flag in ("norm_output", "fc_norm"):
        if raw.get(flag):
            raise UserError(f"{directory}: {flag} = true has no place in llama.cpp's eagle3; use vllm or sglang")
    rope = raw.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        raise UserError(f"{directory}: rope_scaling llama3 has no place in llama.cpp's eagle3; use vllm or sglang")
    return taps


def _add(builder: Builder, name: str, layer: ModelConfig) -> None:
    heads = {"q_proj": layer.heads, "k_proj": layer.gqa_kv_heads}.get(name.split(".")[-2])
    change = None if heads is None else lambda t, h=heads: permute(t, h)
    builder.add(NAMES[name], name, builder.weights.entry(name).shape, change)


def _map(weights: Weights) -> Item:
    def ids() -> Tensor:
        offsets_W = weights.read("d2t").long()
        return offsets_W + torch.arange(len(offsets_W))

    return Item("d2t", weights.entry("d2t").shape, Kind.I64, lambda: ids().numpy())
