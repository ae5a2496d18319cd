"""The untrained draft of a model: which form, which of its words, and what the layer begins as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from nonet.chat import Tokenizer
from nonet.config import Config
from nonet.draft.answers import Answer
from nonet.draft.config import DraftConfig, eagle3_config, mtp_config
from nonet.draft.model import Draft, can_copy, started
from nonet.draft.vocabulary import DraftVocabulary, choose, control_tokens
from nonet.model import Model, ModelConfig


class FormTable(Config):
    form: Literal["auto", "mtp", "eagle3"] = "auto"  # auto: mtp where the target has such a layer
    taps: tuple[int, ...] = ()  # none: the form's own
    vocabulary: int = Field(default=8192, ge=0)  # tokens it can say; 0, or as many as the target has: all of them
    d_ff: int = Field(default=0, ge=0)  # of an eagle3 layer; 0: the target's
    # of form eagle3: layer copies the target's last one, auto where it can
    start: Literal["auto", "random", "layer"] = "auto"
    norm_output: bool = False
    fc_norm: bool = False

    def form_for(self, target: ModelConfig) -> str:
        return ("mtp" if target.mtp_layers else "eagle3") if self.form == "auto" else self.form

    def config(self, target: Model, vocabulary_hash: str, words: int | None, steps: int) -> DraftConfig:
        """words: None for all of the target's. Raises UserError."""
        form = self.form_for(target.config)
        more: dict[str, Any] = {"draft_vocab": words, "norm_output": self.norm_output, "steps": steps}
        if form == "mtp":
            return mtp_config(target.config, vocabulary_hash, taps=self.taps or None, **more)
        layer = {"d_ff": self.d_ff} if self.d_ff else None
        more["fc_norm"] = self.fc_norm
        return eagle3_config(target.config, vocabulary_hash, taps=self.taps or None, layer=layer, **more)


def words_of(table: FormTable, answers: Sequence[Answer], tokenizer: Tokenizer, vocab_size: int) -> DraftVocabulary:
    """By the answers that are trained on."""
    size = min(table.vocabulary or vocab_size, vocab_size)
    return choose([a for a in answers if not a.heldout], size, vocab_size, control_tokens(tokenizer))


def untrained(
    table: FormTable, target: Model, vocabulary_hash: str, words: DraftVocabulary, steps: int, seed: int = 0
) -> Draft:
    """A function of its arguments: made again, it is the same. Raises UserError."""
    d2t_W = words.d2t_W
    config = table.config(target, vocabulary_hash, None if d2t_W is None else len(d2t_W), steps)
    copied = table.start == "layer" or (table.start == "auto" and can_copy(config, target))
    return started(config, target, d2t_W, seed, copied)
