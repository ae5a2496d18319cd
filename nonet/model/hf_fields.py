"""config.json as it is read: fields by name, refusals that say file, field, value and fix.

Owns: the keys all families share, and how a value is fetched and checked. What a family's own fields mean is in
hf_decoder.py and hf_kimi.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nonet.model.config import ModelConfig
from nonet.types import UserError

REQUIRED = object()

# ModelConfig field -> config.json key
COMMON = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "d_ff": "intermediate_size",
    "heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "max_position": "max_position_embeddings",
    "mtp_layers": "num_nextn_predict_layers",
}
# transformers' values for absent keys; a key with none here must be present
DEFAULTS: dict[str, Any] = {"tie_embeddings": False, "init_std": 0.02, "mtp_layers": 0, "mlp_bias": False}

# key -> the values under which every family's maths is right; absent counts as None
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
}


class Fields:
    """One config.json, or a table of it. Keys may be dotted (they descend into tables); several keys of one call are
    spellings of the same field, which must not disagree.
    """

    def __init__(self, raw: Mapping[str, Any], file: Path | str, inside: str = ""):
        self.raw, self.file, self.inside = raw, file, inside

    def fail(self, sentence: str) -> NoReturn:
        raise UserError(f"{self.file}: {self.inside}{sentence}")

    def get(self, *keys: str) -> Any:
        return self.found(*keys)[1]

    def found(self, *keys: str) -> tuple[str, Any]:
        """(the spelling in use, its value); the first spelling and None if the field is absent."""
        here = [(key, value) for key in keys if (value := _at(self.raw, key)) is not None]
        for key, value in here[1:]:
            if value != here[0][1]:
                self.fail(f"{here[0][0]} = {here[0][1]!r} and {key} = {value!r} disagree; keep one")
        return here[0] if here else (keys[0], None)

    def number(self, kind: type, *keys: str, default: Any = REQUIRED, low: int = 1) -> Any:
        """A value of `kind` (int from `low` on, finite float, bool); `default` if absent."""
        key, value = self.found(*keys)
        if value is None:
            if default is REQUIRED:
                self.fail(f"{key} is missing; add it")
            return default
        good = {
            int: isinstance(value, int) and not isinstance(value, bool) and value >= low,
            float: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
            bool: isinstance(value, bool),
        }
        if not good[kind]:
            whole = "a positive integer" if low == 1 else f"an integer of at least {low}"
            wanted = {int: whole, float: "a finite number", bool: "true or false"}[kind]
            self.fail(f"{key} = {value!r}: must be {wanted}; correct the config")
        return value

    def take(self, keys: Mapping[str, str], defaults: Mapping[str, Any], zero: Iterable[str] = ()) -> dict[str, Any]:
        """ModelConfig fields by `keys`, checked against the types ModelConfig declares. zero: may be 0."""
        out: dict[str, Any] = {}
        for field, key in keys.items():
            kind, default = ModelConfig.model_fields[field].annotation, defaults.get(field, REQUIRED)
            if kind in (int, float, bool):
                out[field] = self.number(kind, key, default=default, low=0 if field in zero else 1)
            else:
                value = self.get(key)
                if value is None and default is REQUIRED:
                    self.fail(f"{key} is missing; add it")
                out[field] = default if value is None else value
        if out.get("mtp_layers", 0) not in (0, 1):
            self.fail(f"num_nextn_predict_layers = {out['mtp_layers']!r} is not implemented; only 0 or 1 is")
        return out

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse every key whose value is not one of those under which it changes nothing."""
        for key, allowed in neutral.items():
            value = _at(self.raw, key)
            if value not in allowed:
                wanted = " or ".join("absent" if a is None else repr(a) for a in allowed)
                self.fail(f"{key} = {value!r} is not implemented; only {wanted} is")

    def table(self, key: str) -> Mapping[str, Any] | None:
        value = _at(self.raw, key)
        if value is not None and not isinstance(value, Mapping):
            self.fail(f"{key} = {value!r}: must be a table; correct the config")
        return value


def _at(raw: Mapping[str, Any], key: str) -> Any:
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
