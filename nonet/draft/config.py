"""What a draft is: its form, what it reads of which target, its layer, its vocabulary.

mtp      Kimi K3's: the target's MTP layer behind a fusion matrix [0 0 I], so that it starts as the MTP layer itself
eagle3   one Llama layer on [norm(embedding), norm(fused)], trained from random values (drafts section 4.1)
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from nonet.config import Config, build
from nonet.model import ModelConfig
from nonet.model.taps import checked_taps
from nonet.quant import QuantConfig
from nonet.types import UserError

Form = Literal["mtp", "eagle3"]


class Fingerprint(Config):
    """Which target a draft belongs to: hashes of its dimensions and of its token -> id table ("" if not known)."""

    config: str
    vocabulary: str = ""

    @staticmethod
    def of(config: ModelConfig, vocabulary: str = "") -> Fingerprint:
        """quant is left out: the same target in another precision is served by the same draft."""
        text = config.model_dump_json(exclude={"quant"})
        return Fingerprint(config=hashlib.sha256(text.encode()).hexdigest()[:16], vocabulary=vocabulary)

    def check(self, found: Fingerprint) -> None:
        """Refuse a target that is not the one the draft was made for; raises UserError."""
        if found.config != self.config:
            raise UserError(
                f"target: its dimensions have hash {found.config}, the draft was made for {self.config}; "
                "give the target it was trained on"
            )
        if self.vocabulary and found.vocabulary and found.vocabulary != self.vocabulary:
            raise UserError(
                f"target: its vocabulary has hash {found.vocabulary}, the draft was made for {self.vocabulary}; "
                "the ids of its tokens mean other texts, so train a draft on this one"
            )


class DraftConfig(Config):
    """layer: dimensions of the draft's one layer; of the mtp form they are the target's, but for `quant`, which says on
    what grid the draft's own experts are trained and served. steps: how many it was unrolled over.
    """

    form: Form
    taps: tuple[int, ...]
    layer: ModelConfig
    target: Fingerprint
    depth: int = Field(gt=0)  # layers of the target
    draft_vocab: int | None = Field(default=None, gt=0)  # None: the target's
    steps: int = Field(default=7, ge=1)
    trained_steps: int = Field(default=0, ge=0)  # of the optimiser
    norm_output: bool = False  # recycle the state after the final norm, not before
    norm_before_residual: bool = False  # eagle3: the residual is the normed fused feature
    norm_before_fc: bool = False  # eagle3: one norm over all taps together
    fc_norm: bool = False  # eagle3: one norm for each tap (EAGLE-3.1)

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        checked_taps(self.taps, self.depth)
        if self.draft_vocab is not None and self.draft_vocab > self.layer.vocab_size:
            raise ValueError(f"draft_vocab = {self.draft_vocab}: the target has only {self.layer.vocab_size} tokens")
        if self.form == "mtp":
            if not self.layer.mtp_layers:
                raise ValueError("form = mtp: the target has no MTP layer to start from; use form = eagle3")
            if self.norm_before_residual or self.norm_before_fc or self.fc_norm:
                raise ValueError("norm_before_residual, norm_before_fc, fc_norm: are of form = eagle3 only")
        elif self.layer.moe is not None or self.layer.layer_mixers != ("gqa",):
            raise ValueError("form = eagle3: its layer is one of grouped-query attention and a dense feed-forward")
        if self.layer.quant is not None and self.layer.moe is None:
            raise ValueError("quant: is of routed experts, and this draft's layer has none; leave it out")
        return self

    @property
    def words(self) -> int:
        """Size of its vocabulary."""
        return self.draft_vocab or self.layer.vocab_size


def mtp_config(
    target: ModelConfig,
    vocabulary: str = "",
    *,
    taps: Sequence[int] | None = None,
    quant: QuantConfig | None = None,
    **more: Any,
) -> DraftConfig:
    """The MTP form for a target that has the layer; raises UserError. quant None: as the target's."""
    return build(
        DraftConfig,
        {
            "form": "mtp",
            "taps": default_taps(target, "mtp") if taps is None else checked_taps(taps, target.layers),
            "layer": {**target.model_dump(), **({} if quant is None else {"quant": quant})},
            "target": Fingerprint.of(target, vocabulary),
            "depth": target.layers,
            **more,
        },
        "draft",
    )


def eagle3_config(
    target: ModelConfig,
    vocabulary: str = "",
    *,
    taps: Sequence[int] | None = None,
    layer: dict[str, Any] | None = None,
    **more: Any,
) -> DraftConfig:
    """The EAGLE-3 form for any target; raises UserError. layer: dimensions of ModelConfig that shall differ from the
    target's, such as {"d_ff": 1024}.
    """
    shape = {
        **{"vocab_size": target.vocab_size, "d_model": target.d_model, "layers": 1, "mixers": ("gqa",)},
        **{"heads": target.heads, "kv_heads": target.kv_heads, "head_dim": target.head_dim, "d_ff": target.d_ff},
        **{"norm_eps": target.norm_eps, "rope": target.rope, "max_position": target.max_position},
        **{"activation": target.activation, "init_std": target.init_std, "tie_embeddings": False},
    }
    return build(
        DraftConfig,
        {
            "form": "eagle3",
            "taps": default_taps(target, "eagle3") if taps is None else checked_taps(taps, target.layers),
            "layer": {**shape, **(layer or {})},
            "target": Fingerprint.of(target, vocabulary),
            "depth": target.layers,
            **more,
        },
        "draft",
    )


def default_taps(target: ModelConfig, form: Form) -> tuple[int, ...]:
    """mtp: the outputs of the first, the middle and the last attention-residual block (K3: of blocks 1, 4 and 8), or
    of thirds; the last is what the MTP layer was trained on. eagle3: vLLM's (2, L // 2, L - 3). On a shallow target
    they are moved apart, and there are fewer where they do not fit.

    >>> from nonet.model import ModelConfig
    >>> default_taps(ModelConfig(vocab_size=9, d_model=8, layers=93, d_ff=8, heads=1, attn_res_block=12), "mtp")
    (12, 48, 93)
    """
    L = target.layers
    wanted = tuple(k + 1 for k in target.taps) if form == "mtp" else (2, L // 2, L - 3)
    if 0 <= wanted[0] < wanted[1] < wanted[2]:
        return wanted
    found = tuple(sorted({max(0, L - 2), max(0, L - 1), L}))
    warnings.warn(f"taps {wanted} coincide on a target of {L} layers; {found} are used", stacklevel=2)
    return found
