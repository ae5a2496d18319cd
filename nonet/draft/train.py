"""Training a draft on features of its frozen target; exact over `kill -9`.

A step is a pure function of (draft, optimiser state, step): its micro-batches come from `batches(step)`, their losses
add up to one mean over every prediction of the step, then clip and update. What is kept in the end is the draft that
scored best, by the acceptance measured on held-out rows or by the caller's own verification, never by its loss: past
some point the loss still falls and the acceptance does too. Routers' selection biases stand still.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from nonet.config import Config
from nonet.draft.batch import FeatureBatch
from nonet.draft.checks import check_batches, check_held_out
from nonet.draft.loss import Acceptance, Objective, Teacher, told, weight_of
from nonet.draft.model import Draft
from nonet.lm.schedule import Decay, share
from nonet.model.optimizer import Optimizer, head_counts
from nonet.ops.overlap_rules import Kind
from nonet.progress import progress
from nonet.run import Run
from nonet.types import UserError

Batches = Callable[[int], Sequence[FeatureBatch]]  # optimiser step, from 0 -> its micro-batches; a pure function

RATES = {"mtp": 1e-4, "eagle3": 1e-3}  # trained already; random


class TrainConfig(Config):
    steps: int = Field(default=1000, ge=1)
    unroll: int = Field(default=7, ge=1)  # steps of the draft
    # So many of the steps come first and unroll it once: a fresh draft learns what comes next for a seventh of the
    # price, and then to go on from itself. One schedule goes over all steps: a rate that falls and rises again costs
    # the first guess what it had learnt (docs/log.md).
    single: int = Field(default=0, ge=0)
    loss: Kind = "overlap"
    eta: float = Field(default=3.0, ge=0)  # of loss = hybrid
    fallback: float = Field(default=0.1, ge=0)  # of loss = overlap
    # Of both distributions that are compared: as the draft will be served. Near 0 only the likeliest words count.
    temperature: float = Field(default=1.0, gt=0)
    step_decay: float = Field(default=1.0, gt=0, le=1)  # weight of unrolled step s is step_decay^(s - 1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float | None = Field(default=None, gt=0)  # None: 1e-4 for form mtp, 1e-3 for eagle3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    warmup: float = Field(default=0.03, ge=0, lt=1)  # share of the steps
    decay: Decay = "cosine"
    decay_to: float = Field(default=0.1, ge=0, le=1)
    train_fusion: bool = True
    train_head: bool = True  # of form eagle3
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: matrix products; weights and sums stay float32
    eval_every: int = Field(default=200, ge=1)
    log_every: int = Field(default=10, ge=1)
    save_every_s: float = Field(default=60.0, ge=0)

    @model_validator(mode="after")
    def _some_unrolled(self) -> TrainConfig:
        if self.single >= self.steps:
            raise ValueError(f"single = {self.single}: must be less than steps = {self.steps}")
        return self

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.eta, self.fallback, self.step_decay)

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at an optimiser step, counted from 0."""
        return share(step, self.steps, round(self.warmup * self.steps), self.decay_to, self.decay)

    def at(self, step: int) -> TrainConfig:
        """What holds at an optimiser step, counted from 0."""
        return self.model_copy(update={"unroll": 1}) if step < self.single else self


class Training:
    """Trains `draft` in place.

    heldout: rows for the training-time acceptance. score: measures a draft for the choice (higher is better), such as
    real verification in the engine; None takes the held-out acceptance length. stage: names checkpoints and events.
    """

    def __init__(
        self,
        draft: Draft,
        batches: Batches,
        heldout: Sequence[FeatureBatch],
        config: TrainConfig,
        run: Run,
        stage: str = "draft",
        score: Callable[[Draft], float] | None = None,
    ):
        self.draft, self.batches, self.heldout = draft, batches, heldout
        self.config, self.run, self.stage, self.score = config, run, stage, score
        self.teacher = Teacher(draft.target, draft.d2t_W, config.temperature)
        frozen = {"fc.": config.train_fusion, "lm_head.": config.train_head}
        for name, p in draft.named_parameters():
            if any(name.startswith(part) and not on for part, on in frozen.items()):
                p.requires_grad_(False)

    def fit(self) -> Acceptance:
        """Returns the held-out acceptance of the draft that was kept; raises UserError."""
        c = self.config
        check_batches(self.batches, self.draft.config, c.unroll, c.steps)
        check_held_out(self.heldout, self.draft.config, c.unroll)
        self.optimizer = Optimizer(
            self.draft.named_parameters(), c.optimizer, self._peak, c.betas, c.weight_decay, head_counts(self.draft)
        )
        start = self._restore()
        self.run.rewind(lambda e: e.get("stage") != self.stage or e.get("step", 0) <= start)
        self._saved = time.time()
        if self._best[0] == -math.inf:
            self._evaluate(0)
        with progress(f"{self.stage}: training", c.steps, start) as bar:
            for step in range(start, c.steps):
                lr, now = self._peak * c.rate(step), c.at(step)
                figures = train_step(self.draft, self.teacher, self.optimizer, self.batches(step), lr, now)
                self._account(step + 1, lr, figures)
                bar(step + 1, f"loss {figures['loss']:.3f}, length {figures['length']:.2f} of {now.unroll + 1}")
        self._load_best()
        return measure(self.draft, self.teacher, self.heldout, c)

    @property
    def _peak(self) -> float:
        return self.config.lr or RATES[self.draft.config.form]

    def _account(self, done: int, lr: float, figures: dict[str, Any]) -> None:
        c = self.config
        if not math.isfinite(figures["loss"]):
            raise UserError(f"{self.stage}: the loss is {figures['loss']} at step {done}; start over with a lower lr")
        self._seconds += figures["seconds"]
        if done % c.log_every == 0 or done == c.steps:
            facts = {"stage": self.stage, "step": done, "steps": c.steps, "lr": lr}
            self.run.event("draft_step", **facts, **{**figures, "seconds": self._seconds})
        if done % c.eval_every == 0 or done == c.steps:
            self._evaluate(done)
        elif time.time() - self._saved > c.save_every_s:
            self._save(done)

    # ------------------------------------------------------------------------------- choice

    def _evaluate(self, done: int) -> None:
        found = measure(self.draft, self.teacher, self.heldout, self.config)
        score = found.length if self.score is None else self.score(self.draft)
        self.run.event(
            "draft_acceptance", stage=self.stage, step=done, length=found.length, positions=found.positions,
            chains=found.chains, score=score,
        )  # fmt: skip
        if score > self._best[0]:
            self._best = (score, done)
            blob = {"draft": self.draft.state_dict()}
            self.run.save(f"{self.stage}-best-{done}", lambda d: torch.save(blob, d / "draft.pt"))
        self._save(done)
        self.run.prune(f"{self.stage}-best", keep=1)

    def _load_best(self) -> None:
        blob = torch.load(self.run.checkpoints(f"{self.stage}-best")[-1] / "draft.pt", weights_only=True)
        self.draft.load_state_dict(blob["draft"])
        self.draft.config = self.draft.config.model_copy(
            update={"steps": self.config.unroll, "trained_steps": self._best[1]}
        )

    # ------------------------------------------------------------------------------- checkpoints

    def _save(self, done: int) -> None:
        blob = {"draft": self.draft.state_dict(), "optimizer": self.optimizer.state_dict()}
        blob |= {"seconds": self._seconds, "best": self._best}
        self.run.save(f"{self.stage}-{done}", lambda d: torch.save(blob, d / "state.pt"))
        self.run.prune(self.stage, keep=1)
        self._saved = time.time()

    def _restore(self) -> int:
        """Steps that are done."""
        self._seconds, self._best = 0.0, (-math.inf, 0)
        found = self.run.checkpoints(self.stage)
        if not found:
            return 0
        blob = torch.load(found[-1] / "state.pt", weights_only=True)
        _same_map(blob["draft"].get("d2t_W"), self.draft)
        self.draft.load_state_dict(blob["draft"])
        self.optimizer.load_state_dict(blob["optimizer"])
        self._seconds, self._best = blob["seconds"], blob["best"]
        return int(found[-1].name.rsplit("-", 1)[1])


def _same_map(stored_W: torch.Tensor | None, draft: Draft) -> None:
    mine = draft.d2t_W
    same = stored_W is mine is None or (stored_W is not None and mine is not None and torch.equal(stored_W, mine))
    if not same:
        raise UserError(
            "d2t: the checkpoint's vocabulary is another one, and every row of its head would mean another token; "
            "continue with the map it was started with, or start over"
        )


def train_step(
    draft: Draft, teacher: Teacher, optimizer: Optimizer, batches: Sequence[FeatureBatch], lr: float, c: TrainConfig
) -> dict[str, Any]:
    """One optimiser step; the mean over all predictions, whatever the micro-batches. Figures of it."""
    began, seen, loss = time.time(), Acceptance(c.unroll), 0.0
    weights = [weight_of(batch, c.unroll, c.objective) for batch in batches]
    for batch, weight in zip(batches, weights, strict=True):
        if not weight:
            continue
        part = told(draft, teacher, batch, c.unroll, c.objective, c.precision == "bf16")
        assert part.loss is not None
        mine = part.loss * (weight / sum(weights))
        mine.backward()
        loss += float(mine.detach())
        seen.add(part.alpha_BTK)
    norm = optimizer.step(lr, c.grad_clip) if any(weights) else 0.0
    return {
        "loss": loss, "length": seen.length, "grad_norm": norm, "predictions": seen.chains,
        "tokens": sum(b.tokens for b in batches), "seconds": time.time() - began,
    }  # fmt: skip


@torch.no_grad()
def measure(draft: Draft, teacher: Teacher, batches: Sequence[FeatureBatch], c: TrainConfig) -> Acceptance:
    """Training-time acceptance over these rows, in float32 always: rounded logits overlap less."""
    found = Acceptance(c.unroll)
    for batch in batches:
        found.add(told(draft, teacher, batch, c.unroll, c.objective).alpha_BTK)
    return found
