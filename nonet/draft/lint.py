"""Whether a published draft means the same to every engine: each one's reading, computed and compared.

Golden logits: the target reads a fixed row of tokens, the draft guesses three steps from every position, once as its
maker meant it and once as an engine would read its directory. Refusals of an engine are loud and harmless; a reading
that loads and computes something else is the silent fault this is for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nonet.draft.batch import FeatureBatch
from nonet.draft.model import Draft
from nonet.draft.published import Files, Reading, draft_of
from nonet.draft.readings import ENGINES, meant
from nonet.draft.unroll import unrolled
from nonet.model import Model, hf
from nonet.model.taps import Taps
from nonet.types import UserError

STEPS = 3
LENGTH = 48
TOLERANCE = 1e-3  # of a logit; both sides are computed in float32 by the same code


@dataclass(frozen=True)
class Verdict:
    """One engine's. gap: largest difference of a logit (inf: not the same tokens), agreement: share of equal guesses;
    None where nothing could be computed.
    """

    engine: str
    silent: tuple[str, ...]
    loud: tuple[str, ...]
    gap: float | None = None
    agreement: float | None = None

    @property
    def state(self) -> str:
        return "wrong without a word" if self.silent else "refuses to load" if self.loud else "right"


def lint(folder: Path | str, target: Path | str | Model, engines: Collection[str] = ()) -> list[Verdict]:
    """Verdicts of these engines (none given: all of them) on a directory for this target. UserError where what its
    maker meant cannot be known: then no engine can be right.
    """
    unknown = set(engines) - ENGINES.keys()
    if unknown:
        raise UserError(f"engine = {', '.join(sorted(unknown))}: not known; use {', '.join(ENGINES)}")
    files = Files.of(folder)
    if "taps" in files.config:
        raise UserError(f"{folder}: is nonet's own draft, which no engine reads; export it first (nonet draft export)")
    model = target if isinstance(target, Model) else hf.load(target)
    truth = meant(files, model)
    if truth.loud:
        raise UserError(f"{folder}: {'; '.join(truth.loud)}")
    golden = Golden(model)
    known = golden.logits(draft_of(truth, files, model))
    return [_verdict(name, files, model, truth, golden, known) for name in (engines or ENGINES)]


def _verdict(
    name: str, files: Files, target: Model, truth: Reading, golden: Golden, known: Sequence[Tensor]
) -> Verdict:
    reading = ENGINES[name](files, target)
    silent = [*reading.silent, *(s for s in truth.silent if s not in reading.silent)]
    if reading.loud:
        return Verdict(name, (), reading.loud)
    try:
        logits = golden.logits(draft_of(reading, files, target))
    except UserError as e:  # a shape that does not fit: engines stop there too
        return Verdict(name, (), (str(e),))
    gap, agreement = compared(logits, known)
    if gap > TOLERANCE:
        silent += reading.differences(truth) or ["its logits differ"]
    return Verdict(name, tuple(silent), (), gap, agreement)


class Golden:
    """The fixed row, and what the target's every layer makes of it."""

    def __init__(self, target: Model, seed: int = 0):
        config = target.config
        generator = torch.Generator().manual_seed(seed)
        length = min(LENGTH, config.max_position)
        self.tokens_BT = torch.randint(0, config.vocab_size, (1, length), generator=generator)
        every = Taps(range(config.layers + 1))
        with torch.inference_mode():
            self.hidden_BTD = target(self.tokens_BT, taps=every).float()
        self._states = every.features_BTF.float().unflatten(-1, (config.layers + 1, config.d_model))

    @torch.inference_mode()
    def logits(self, draft: Draft) -> list[Tensor]:
        """[R, V] of each step over the target's vocabulary, -inf where the draft has no word."""
        features_BTF = self._states[:, :, list(draft.config.taps)].flatten(2)
        mask_BT = torch.ones_like(self.tokens_BT, dtype=torch.bool)
        batch = FeatureBatch(self.tokens_BT, features_BTF, self.hidden_BTD, mask_BT)
        return [self._whole(draft, draft.logits(out_BRD)[0]) for out_BRD in unrolled(draft, batch, STEPS)]

    def _whole(self, draft: Draft, logits_RW: Tensor) -> Tensor:
        if draft.d2t_W is None:
            return logits_RW
        out_RV = logits_RW.new_full((len(logits_RW), draft.target.config.vocab_size), -torch.inf)
        out_RV[:, draft.d2t_W] = logits_RW
        return out_RV


def compared(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[float, float]:
    """(largest difference of a logit, share of equal guesses) over all steps; inf where one has a word and the other
    has not.
    """
    gap, same, rows = 0.0, 0, 0
    for a_RV, b_RV in zip(a, b, strict=True):
        if not torch.equal(a_RV.isinf(), b_RV.isinf()):
            gap = torch.inf
        else:
            gap = max(gap, float((a_RV - b_RV).nan_to_num(0.0).abs().max()))
        same += int((a_RV.argmax(-1) == b_RV.argmax(-1)).sum())
        rows += len(a_RV)
    return gap, same / rows


def table(verdicts: Sequence[Verdict]) -> str:
    """Lines for people."""
    lines = []
    for v in verdicts:
        measured = "" if v.gap is None else f"  logits within {v.gap:.1e}, {v.agreement:.0%} of guesses equal"
        lines.append(f"{v.engine:9} {v.state}{measured}")
        lines += [f"          - {text}" for text in (*v.silent, *v.loud)]
    return "\n".join(lines)
