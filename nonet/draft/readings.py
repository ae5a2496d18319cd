"""How each engine reads an EAGLE-3 directory: vLLM, SGLang, TensorRT-LLM and llama.cpp, and what its maker meant.

Owns: where each looks for the layer ids and counts them from, which flags it knows and their defaults, whose embedding
it uses, what it does about a missing map; of vLLM 0.32, SGLang 0.5.23, TensorRT-LLM and llama.cpp of autumn 2026.

    ids for the same hidden state k (k layers have run)      absent
    vLLM           k, top level; else the nested ones as k     (2, L // 2, L - 3)
    SGLang         k - 1, nested in eagle_config only          (2, L // 2, L - 3)
                   deepseek targets: k, unless the first is 1
    TensorRT-LLM   not read; eagle3_layers_to_capture = k - 1  k = (2, L // 2, L - 3)
    llama.cpp      k, eagle3.target_layers, exactly three
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nonet.draft.published import EMBED, FLAGS, HEAD, IDS, MAP, Files, Reading, audit, layer_of
from nonet.model import Model
from nonet.model.hf_config import family_of
from nonet.types import UserError

VLLM_NAMES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"}
SGLANG_NAMES = {"LlamaForCausalLMEagle3"}
TRT_NAMES = {"EAGLE3LlamaForCausalLM", "LlamaForCausalLMEagle3"}
COMMON_LENGTH = 2048  # what transformers takes where max_position_embeddings is missing


@dataclass
class _Reader:
    """A reading being made: what is found on the way."""

    who: str
    files: Files
    target: Model
    silent: list[str] = field(default_factory=list)
    loud: list[str] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return self.target.config.layers

    def finish(
        self,
        taps: Sequence[int],
        flags: Mapping[str, bool],
        ids_W: Tensor | None,
        own_embedding: bool,
        own_head: bool,
        unknown: Callable[[Iterable[str]], None],
    ) -> Reading:
        """unknown: what this engine does about tensors it has no place for."""
        table = {"max_position_embeddings": COMMON_LENGTH, **self.files.layer_config}
        layer = layer_of(table, self.files.folder / "config.json")
        if layer.max_position < self.target.config.max_position:
            self.silent.append(
                f"max_position_embeddings = {layer.max_position}, the target has {self.target.config.max_position}: "
                "past it drafts are wrong or none are made"
            )
        if len(set(taps)) < len(taps):
            self.silent.append(f"the taps {list(taps)} name a hidden state twice")
        ordered = tuple(sorted(set(taps)))  # states arrive in the order of the layers, whatever the config's
        output, residual, before_fc, fc_norm = (flags.get(name, False) for name in FLAGS)
        reading = Reading(
            self.who, ordered, layer, output, residual, before_fc, fc_norm, ids_W, own_embedding, own_head
        )
        lacking, surplus = audit(reading, self.files)
        if lacking:
            self.silent.append(f"tensors are missing and stay random: {', '.join(lacking[:4])}")
        if surplus:
            unknown(surplus)
        return replace(reading, silent=tuple(self.silent), loud=tuple(self.loud))

    # -------------------------------------------------------------- pieces

    def architecture(self, known: set[str]) -> None:
        names = self.files.config.get("architectures") or []
        if not known & set(names):
            self.loud.append(f"architectures = {names}: has no loader; it knows {', '.join(sorted(known))}")

    def default_taps(self) -> tuple[int, int, int]:
        return 2, self.depth // 2, self.depth - 3

    def ids(self, nested: bool) -> list[int] | None:
        table = self.files.eagle_config if nested else self.files.config
        found = table.get(IDS)
        if found is None or found == []:
            return None
        if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
            raise UserError(f"{self.files.folder}/config.json: {IDS} = {found!r}: must be a list of layer numbers")
        return found

    def within(self, taps: Sequence[int], low: int, high: int) -> None:
        outside = [k for k in taps if not low <= k <= high]
        if outside:
            self.loud.append(f"taps {outside}: it hands out hidden states {low} to {high} of this target only")

    def mapped(self, words: int | None) -> Tensor | None:
        """Target ids of the head's rows as engines that take offsets read them."""
        V = self.target.config.vocab_size
        words = words or V
        if MAP in self.files.entries:
            offsets_W = self.files.tensor(MAP).long()
            ids_W = offsets_W + torch.arange(len(offsets_W))
            return None if torch.equal(ids_W, torch.arange(V)) else ids_W
        if words == V:
            return None
        self.silent.append(
            f"draft_vocab_size = {words} of {V} and no d2t among the tensors: row i is taken for token i "
            "(a map in a file of its own is not read)"
        )
        return torch.arange(words)

    def brings_embedding(self) -> bool:
        """Whether the directory's embedding is another than the target's."""
        if EMBED not in self.files.entries:
            return False
        mine, theirs = self.files.tensor(EMBED), self.target.embed_tokens.weight.detach()
        return mine.shape != theirs.shape or not torch.equal(mine.to(theirs.dtype), theirs)

    def refuses(self, surplus: Iterable[str]) -> None:
        self.loud.append(f"has no place for {', '.join(list(surplus)[:4])}")

    def skips(self, surplus: Iterable[str]) -> None:
        self.silent.append(f"skips tensors it has no place for: {', '.join(list(surplus)[:4])}")

    def unheeded(self, flags: Mapping[str, Any], known: Iterable[str]) -> None:
        for name in set(flags) - set(known):
            if flags[name]:
                self.silent.append(f"{name} = true is not implemented and passed over")


# ------------------------------------------------------------------------------------ what was meant


def meant(files: Files, target: Model) -> Reading:
    """Everything the directory says, taken at its word, in its maker's convention. UserError where it contradicts
    itself or cannot be whole.
    """
    r = _Reader("meant", files, target)
    flags = _stated(files)
    top, nested = r.ids(nested=False), r.ids(nested=True)
    counted = None if nested is None else _from_outputs(nested, target)
    if top is not None and counted is not None and sorted(top) != sorted(counted):
        raise UserError(
            f"{files.folder}: {IDS} = {top} at the top means hidden states {top}, eagle_config's {nested} means "
            f"{counted}; write the nested ones one lower, or remove one"
        )
    taps = top or counted or r.default_taps()
    if len(taps) and files.entries.get("fc.weight") is not None:
        width = files.entries["fc.weight"].shape[1]
        if width != len(taps) * target.config.d_model:
            raise UserError(
                f"{files.folder}: fc.weight reads {width} values, {len(taps)} taps of the target give "
                f"{len(taps) * target.config.d_model}; correct {IDS} or give the right target"
            )
    words = files.config.get("draft_vocab_size")
    if words not in (None, target.config.vocab_size) and MAP not in files.entries:
        raise UserError(
            f"{files.folder}: draft_vocab_size = {words} and the tensors hold no d2t; which tokens its rows stand for "
            "is not said, put the map into model.safetensors"
        )
    ids_W = r.mapped(words)
    if ids_W is not None and (int(ids_W.min()) < 0 or int(ids_W.max()) >= target.config.vocab_size):
        raise UserError(
            f"{files.folder}: d2t names tokens {int(ids_W.min())} to {int(ids_W.max())}; it must hold offsets"
        )
    if r.brings_embedding():
        r.silent.append("embed_tokens differs from the target's: vLLM uses it, SGLang and TensorRT-LLM do not")
    return r.finish(taps, flags, ids_W, r.brings_embedding(), HEAD in files.entries, r.skips)


def _stated(files: Files) -> dict[str, bool]:
    c, e = files.config, files.eagle_config
    return {
        "norm_output": bool(c.get("norm_output") or e.get("return_hidden_post_norm")),
        "norm_before_residual": bool(c.get("norm_before_residual", False)),
        "norm_before_fc": bool(e.get("norm_before_fc", c.get("norm_before_fc", False))),
        "fc_norm": bool(c.get("fc_norm") or c.get("use_aux_norm")),
    }


def _from_outputs(ids: Sequence[int], target: Model) -> list[int]:
    """Hidden states k of nested ids: outputs of these layers, but on deepseek-like targets only if the first is 1."""
    literal = family_of(target.config) not in ("llama", "qwen2", "qwen3") and ids[0] != 1
    return list(ids) if literal else [i + 1 for i in ids]


# ------------------------------------------------------------------------------------ engines


def vllm(files: Files, target: Model) -> Reading:
    r = _Reader("vllm", files, target)
    c, e = files.config, files.eagle_config
    if files.speculators:
        _speculators_table(r)
        flags = {
            **{f: bool(c.get(f, False)) for f in FLAGS},
            "norm_before_residual": c.get("norm_before_residual", True),
        }
    else:
        r.architecture(VLLM_NAMES)
        flags = {f: bool(c.get(f, False)) for f in FLAGS}
        flags["norm_before_fc"] = bool(e.get("norm_before_fc", c.get("norm_before_fc", False)))
    top, nested = r.ids(nested=False), None if files.speculators else r.ids(nested=True)
    if top is None and nested is not None:
        r.silent.append(f"takes the nested ids {nested} as they are, and its newer runner the default in their place")
    taps = top or nested or r.default_taps()
    r.within(taps, 0, r.depth)
    counted = c.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    if counted != len(taps):
        r.loud.append(f"makes a fusion of {counted} states for {len(taps)} taps; set num_aux_hidden_states")
    ids_W = r.mapped(c.get("draft_vocab_size"))
    if ids_W is not None and HEAD not in files.entries:
        r.loud.append("has no head for a vocabulary of the draft's own: lm_head.weight is missing")
    return r.finish(taps, flags, ids_W, r.brings_embedding(), HEAD in files.entries, r.refuses)


def _speculators_table(r: _Reader) -> None:
    c = r.files.config
    if c["speculators_model_type"] != "eagle3":
        r.loud.append(f"speculators_model_type = {c['speculators_model_type']!r}: not an eagle3 draft")
    methods = (c.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if "speculative_tokens" not in methods[0] or not isinstance(c.get("transformer_layer_config"), dict):
        r.loud.append("needs speculators_config.proposal_methods.0.speculative_tokens and transformer_layer_config")
    if not ((c.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path"):
        r.loud.append("needs speculators_config.verifier.name_or_path")


def sglang(files: Files, target: Model) -> Reading:
    r = _Reader("sglang", files, target)
    r.architecture(SGLANG_NAMES)
    stated = _stated(files)
    nested = r.ids(nested=True)
    taps = r.default_taps() if nested is None else _from_outputs(nested, target)
    if nested is None and r.ids(nested=False) is not None:
        r.silent.append(f"reads {IDS} inside eagle_config only and takes the default in its place")
    r.within(taps, 0, r.depth - 1)
    c, e = files.config, files.eagle_config
    flags = {
        "norm_output": bool(c.get("norm_output", False)),
        "norm_before_fc": bool(e.get("norm_before_fc", c.get("norm_before_fc", False))),
        "fc_norm": bool(c.get("fc_norm") or c.get("use_aux_norm")),
    }
    r.unheeded(stated, flags)
    ids_W = r.mapped(c.get("draft_vocab_size"))
    own_head = c.get("draft_vocab_size") is not None
    return r.finish(taps, flags, ids_W, False, own_head, r.skips)


def trtllm(files: Files, target: Model) -> Reading:
    """Its layers come from its own configuration; what it takes without one is read here."""
    r = _Reader("trtllm", files, target)
    r.architecture(TRT_NAMES)
    c, e = files.config, files.eagle_config
    flags = {
        "norm_output": bool(e.get("return_hidden_post_norm") or c.get("norm_output", False)),
        "norm_before_fc": bool(e.get("norm_before_fc", False)) and not c.get("fc_norm", False),
        "fc_norm": bool(c.get("fc_norm", False)),
    }
    r.unheeded(_stated(files), flags)
    ids_W = r.mapped(c.get("draft_vocab_size"))
    return r.finish(r.default_taps(), flags, ids_W, False, HEAD in files.entries, r.refuses)


def llamacpp(files: Files, target: Model) -> Reading:
    """Of the file that `nonet draft export --to gguf` would make."""
    r = _Reader("llamacpp", files, target)
    stated, m = _stated(files), meant(files, target)
    flags = {f: stated[f] for f in ("norm_before_residual", "norm_before_fc")}
    r.unheeded(stated, flags)
    if len(m.taps) != 3:
        r.loud.append(f"{len(m.taps)} taps: it takes exactly three")
    r.within(m.taps, 0, r.depth - 1)
    return r.finish(m.taps, flags, m.ids_W, m.own_embedding, m.own_head, r.refuses)


ENGINES: dict[str, Callable[[Files, Model], Reading]] = {
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": trtllm,
    "llamacpp": llamacpp,
}
