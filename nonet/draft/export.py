"""A draft written for other software, in each one's own convention; `lint` then reads it back as they would.

    vllm, sglang   one directory for both: layer ids k at the top for vLLM, k - 1 inside eagle_config for SGLang
    speculators    the format of vLLM's own training library
    mtp            a copy of the target whose MTP layer is the draft's; only while the fusion is [0 ... 0 I]

Embedding, rotary settings and context length are the target's: the embedding is left out, so that every engine takes
the target's, and the others are written out, since engines' defaults (2,048 positions) are not.
Refuses: what the format has no word for. Nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.draft.model import Draft
from nonet.draft.published import FLAGS, IDS, MAP
from nonet.model import hf
from nonet.model.hf_config import family_of, to_json
from nonet.types import UserError


def export(draft: Draft, target: Path | str, out: Path | str, to: str, tokens: int = 4, project: bool = False) -> Path:
    """Write `draft`, made for the model in `target`, as a directory `out` in format `to`; returns it.

    tokens: how many to draft, where the format says so. project: of mtp, leave a trained fusion out.
    """
    out = Path(out)
    if to not in FORMATS:
        raise UserError(f"to = {to!r}: no such format; use {', '.join([*FORMATS, 'gguf'])}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out = {out}: exists and is not empty; name another directory or remove it")
    if draft.config.form == "mtp" and to != "mtp":
        raise UserError("form = mtp: engines load it inside its target; export it --to mtp")
    FORMATS[to](draft, Path(target), out, tokens, project)
    return out


# ------------------------------------------------------------------------------- EAGLE-3


def _vllm(draft: Draft, target: Path, out: Path, tokens: int, project: bool) -> None:
    _write(draft, out, _flat(draft))


def _sglang(draft: Draft, target: Path, out: Path, tokens: int, project: bool) -> None:
    c = draft.config
    if c.norm_before_residual:
        raise UserError("norm_before_residual = true: SGLang has no such residual; export to vllm or speculators")
    if c.taps[-1] >= c.depth:
        raise UserError(f"taps = {list(c.taps)}: SGLang hands out no state after the last layer; export to vllm")
    _write(draft, out, _flat(draft))


def _flat(draft: Draft) -> dict[str, Any]:
    c = draft.config
    nested: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": c.norm_before_fc}
    if (ids := _outputs(draft)) is not None:
        nested[IDS] = ids
    if c.norm_output:
        nested["return_hidden_post_norm"] = True
    return {
        **_layer(draft),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.words,
        IDS: list(c.taps),
        "num_aux_hidden_states": len(c.taps),
        "target_hidden_size": c.layer.d_model,
        **{flag: getattr(c, flag) for flag in FLAGS},
        "eagle_config": nested,
    }


def _outputs(draft: Draft) -> list[int] | None:
    """SGLang's ids of the taps: the layers whose outputs they are. On targets other than Llama and Qwen it adds one
    only to ids that begin with 1; None where its rule cannot name these taps.
    """
    taps = draft.config.taps
    if family_of(draft.target.config) in ("llama", "qwen2", "qwen3"):
        return [k - 1 for k in taps]
    if taps[0] == 2:
        return [k - 1 for k in taps]
    return None if taps[0] == 1 else list(taps)


def _speculators(draft: Draft, target: Path, out: Path, tokens: int, project: bool) -> None:
    c = draft.config
    if c.norm_before_fc and c.fc_norm:
        raise UserError("norm_before_fc and fc_norm: speculators takes one of them; train with one")
    proposal = {
        **{"proposal_type": "greedy", "speculative_tokens": tokens},
        **{"verifier_accept_k": 1, "accept_tolerance": 0.0},
    }
    verifier = {"name_or_path": str(target), "architectures": to_json(draft.target.config)["architectures"]}
    methods = {"default_proposal_method": "greedy", "proposal_methods": [proposal]}
    config = {
        **{"speculators_model_type": "eagle3", "speculators_version": "0.9.0"},
        "architectures": ["Eagle3DraftModel"],
        **{"draft_vocab_size": c.words, "target_hidden_size": c.layer.d_model, "embed_requires_grad": False},
        **{flag: getattr(c, flag) for flag in FLAGS},
        IDS: list(c.taps),
        "speculators_config": {"algorithm": "eagle3", **methods, "verifier": verifier},
        "transformer_layer_config": _layer(draft),
        "torch_dtype": _dtype(draft),
    }
    _write(draft, out, config, selected=True)


def _layer(draft: Draft) -> dict[str, Any]:
    """config.json of a one-layer llama with the draft's dimensions, positions as the target's."""
    layer, whole = draft.config.layer, draft.target.config
    layer = layer.model_copy(update={"max_position": max(layer.max_position, whole.max_position)})
    table = to_json(layer)
    if table["model_type"] != "llama" or "nonet" in table:
        raise UserError(f"draft: its layer is no plain llama layer ({table['model_type']}); engines have no other")
    rope = {"rope_theta": table["rope_theta"], **(table["rope_scaling"] or {"rope_type": "default"})}
    return {**table, "rope_parameters": rope, "torch_dtype": _dtype(draft)}


def _dtype(draft: Draft) -> str:
    return str(draft.fc.weight.dtype).removeprefix("torch.")


def _write(draft: Draft, out: Path, config: dict[str, Any], selected: bool = False) -> None:
    """selected: also which of the target's tokens the draft has, as speculators keeps it."""
    if config.get("rope_parameters", {}).get("rope_type") == "default" and config.get("rope_scaling") is None:
        config.pop("rope_scaling", None)
    out.mkdir(parents=True, exist_ok=True)
    hf.write_weights(_tensors(draft, selected), out)
    hf.write_json(out / "config.json", config)


def _tensors(draft: Draft, selected: bool) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in draft.named_parameters():
        yield name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name, parameter.detach().clone()
    V = draft.target.config.vocab_size
    ids_W = torch.arange(V) if draft.d2t_W is None else draft.d2t_W.cpu()
    if draft.d2t_W is not None or selected:
        yield MAP, ids_W - torch.arange(len(ids_W))
    if selected:
        yield "t2d", torch.zeros(V, dtype=torch.bool).index_fill_(0, ids_W, True)


# ------------------------------------------------------------------------------- MTP


def _mtp(draft: Draft, target: Path, out: Path, tokens: int, project: bool) -> None:
    """The target's directory with the draft in place of its MTP layer (k3 section 3.2b)."""
    c = draft.config
    if c.form != "mtp":
        raise UserError("form = eagle3: is no MTP layer; export it to vllm, sglang, speculators or gguf")
    if c.norm_output:
        raise UserError("norm_output = true: an MTP layer recycles its state before the norm; train without it")
    if not plain_fusion(draft) and not project:
        raise UserError(
            "fusion: was trained away from [0 ... 0 I], and MTP weights have no place for it. Train with the fusion "
            "frozen, or leave it out with --project, which costs acceptance: measure it with nonet draft eval"
        )
    model = hf.load(target, dtype=draft.fc.weight.dtype)
    assert model.mtp is not None
    model.mtp.load_state_dict(draft.mtp.state_dict())
    hf.save(model, out)
    hf.copy_tokenizer(target, out)


def plain_fusion(draft: Draft) -> bool:
    """Whether fc still hands on the last tap alone, bit for bit, and that is what an MTP layer reads."""
    d = draft.config.layer.d_model
    weight = draft.fc.weight.detach()
    identity = torch.equal(weight[:, -d:], torch.eye(d, dtype=weight.dtype)) and not weight[:, :-d].any()
    return identity and draft.config.taps[-1] == draft.config.depth


FORMATS: dict[str, Callable[[Draft, Path, Path, int, bool], None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "speculators": _speculators,
    "mtp": _mtp,
}
