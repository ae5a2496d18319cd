"""The stage "draft" of `nonet run`: after RL, the policy's own MTP layer becomes a draft of the policy; of one that has
none, a copy of its last layer (EAGLE-3).

OUT/draft/answers/     what the policy says to training tasks, at temperature 1       (draft_play.py)
OUT/draft/features/    its hidden states there; deleted when the draft is there        (draft/store.py)
OUT/checkpoints/       of training                                                     (draft/train.py)
OUT/models/draft       the draft: nonet serve OUT/models/rl --draft OUT/models/draft

RL leaves the MTP layer as the cold start made it, so it guesses what an earlier policy would say, and was never trained
on its own states. Measured are therefore both: the layer as it is, drafting several tokens, and the tuned draft.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nonet.draft import files
from nonet.draft.answers import Answer
from nonet.draft.config import DraftConfig
from nonet.draft.model import Draft
from nonet.draft.store import FeatureStore, Kind, capture, trainable
from nonet.draft.train import TrainConfig, Training
from nonet.draft.windows import Windows
from nonet.model import Model, hf
from nonet.pipeline.cells import MODES
from nonet.pipeline.context import Context
from nonet.pipeline.draft_eval import Told, by_domain, figures, resampled, within
from nonet.pipeline.draft_play import Policy
from nonet.pipeline.draft_start import untrained, words_of
from nonet.run import Run

STAGE = "draft"
DRAFTS = ("untouched", "tuned")


def draft(c: Context) -> None:
    table = c.recipe.draft
    if not table.prompts:
        return
    model = hf.load(c.policy)
    policy = policy_of(c, model)
    answers = policy.answers(c.run.path / "draft" / "answers", table.prompts, table.chosen_by)
    words = words_of(table, answers, c.tokenizer, model.config.vocab_size)

    def fresh() -> Draft:
        return untrained(table, model, files.vocabulary_hash(c.policy), words, table.train.unroll, c.recipe.run.seed)

    untouched = fresh()
    tuned = _tuned(c, model, answers, fresh())
    for mode, temperature in MODES.items():
        told = {
            name: policy.told(d, temperature, table.measured, table.tokens)
            for name, d in zip(DRAFTS, (untouched, tuned), strict=True)
        }
        for event in measured_events(told):
            c.run.event("draft_measured", stage=STAGE, mode=mode, tokens=table.tokens, **event)


def policy_of(c: Context, model: Model) -> Policy:
    settings = {domain: c.setting(domain) for domain in c.recipe.tasks.sources}
    return Policy(model, settings, c.recipe.rl.max_tokens, c.recipe.rl.max_batch)


def _tuned(c: Context, model: Model, answers: Sequence[Answer], draft: Draft) -> Draft:
    """The trained draft of the run directory, trained now if it is not there."""
    table, out, folder, config = c.recipe.draft, c.models("draft"), c.run.path / "draft", draft.config
    if not (out / "config.json").exists():
        t = table.train.temperature
        learnt, held = (
            captured(model, answers, side, folder / "features", config, temperature=t) for side in (False, True)
        )
        fit(draft, learnt, held, table.window, table.batch_tokens, table.train, c.run, STAGE)
        partial = out.with_name(".draft")
        shutil.rmtree(partial, ignore_errors=True)
        files.save(draft, partial)
        partial.rename(out)
    shutil.rmtree(folder / "features", ignore_errors=True)
    return files.load(out, model, config.target.vocabulary)


def captured(
    model: Model, answers: Sequence[Answer], heldout: bool, folder: Path, config: DraftConfig, kind: Kind = "bf16",
    temperature: float = 1.0,
) -> FeatureStore:  # fmt: skip
    """Features of one side's answers, under `folder`, for a training at this temperature."""
    target = f"{config.target.config}/{config.target.vocabulary}"
    rows = trainable(answers, heldout)
    folder = folder / ("held" if heldout else "learnt")
    return capture(model, rows, folder, config.taps, kind, target, temperature=temperature)


def fit(
    draft: Draft, learnt: FeatureStore, held: FeatureStore, window: int, tokens: int, config: TrainConfig, run: Run,
    stage: str, score: Callable[[Draft], float] | None = None,
) -> None:  # fmt: skip
    """Train in place, on batches of `tokens` tokens. Of the drafts on the way the one that does best is kept, on `held`
    or by `score`.
    """
    windows = Windows.of(learnt, window, tokens)
    chosen_by = list(Windows.of(held, window, tokens).in_order())
    Training(draft, lambda step: [windows.batch(step)], chosen_by, config, run, stage, score).fit()


# ------------------------------------------------------------------------------------ figures


def measured_events(told: Mapping[str, Sequence[Told]]) -> Iterator[dict[str, Any]]:
    """By domain, and over all: each draft's figures, and the factor between their lengths."""
    found = {name: {"all": figures(of), **by_domain(of)} for name, of in told.items()}
    first, last = (told[name] for name in DRAFTS)
    for domain in found[DRAFTS[0]]:
        before, after = ([t for t in of if domain in ("all", t.asked.domain)] for of in (first, last))
        yield {"domain": domain, **{name: found[name][domain] for name in DRAFTS}, "factor": ratio(before, after)}


def ratio(first: Sequence[Told], last: Sequence[Told]) -> dict[str, float]:
    """Acceptance length of `last` over that of `first`, with a 95% interval that resamples tasks: both play the same
    ones, and of a task where either loops neither counts. {} if none is left.
    """
    kept = [{t.asked.name: t.drafts for t in of if t.drafts.proposed and not t.looping} for of in (first, last)]
    names = [name for name in kept[0] if name in kept[1]]
    if not names:
        return {}
    counts = [[(sum(of[n].accepted), of[n].proposed[0]) for n in names] for of in kept]
    before, after = (1 + sum(a for a, _ in of) / sum(n for _, n in of) for of in counts)
    low, high = within(resampled(counts[1]) / resampled(counts[0]))
    return {"ratio": after / before, "low": low, "high": high}
