"""Pretraining on a corpus, in stages of growing context, exact over `kill -9`.

Each step: `batch_tokens` tokens of whole rows, packed so that documents do not see each other, in micro-batches whose
gradients add up to the mean over every predicted token of the step; then clip, Muon + AdamW, and the routers' balance.
Extending the context is another stage and nothing else: longer rows from longer documents. No parameter of the model
knows a position, so none is touched.

A step is a pure function of (weights, optimiser state, seed, step): a run that continues from a checkpoint repeats the
uninterrupted run's losses to the last bit (on the same machine with the same number of threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from nonet.config import Config
from nonet.lm.batches import Piece, laid_out, micro_batches
from nonet.lm.corpus import Corpus
from nonet.lm.held_out import HeldOut
from nonet.lm.packed import Block, mtp_losses, predictions, token_losses
from nonet.lm.schedule import Decay, share
from nonet.model import Model
from nonet.model.optimizer import Optimizer, head_counts
from nonet.progress import progress
from nonet.run import Run
from nonet.types import UserError

CHECKPOINT = "pretrain"


class StageConfig(Config):
    """What a stage leaves open (None) is taken from [pretrain]."""

    context: int = Field(ge=8)
    steps: int = Field(ge=1)
    lr: float | None = Field(default=None, gt=0)
    batch_tokens: int | None = Field(default=None, ge=8)
    min_document: int | None = Field(default=None, ge=0)  # None: 0 in the first stage, the context in later ones


class PretrainConfig(Config):
    stages: tuple[StageConfig, ...] = Field(default=(StageConfig(context=256, steps=1000),), min_length=1)
    batch_tokens: int = Field(default=8192, ge=8)  # of one step; rows of `context` tokens, at least one
    micro_tokens: int = Field(default=4096, ge=8)  # of one forward: bounds memory, changes only rounding
    optimizer: Literal["muon", "adamw"] = "muon"
    per_head: bool = True  # Muon orthogonalises q, k and v head by head; False: each projection whole
    lr: float = Field(default=4e-3, gt=0)  # peak of every stage
    warmup: float = Field(default=0.01, ge=0, lt=1)  # share of a stage's steps
    decay: Decay = "cosine"
    decay_to: float = Field(default=0.1, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    mtp_weight: float = Field(default=0.1, ge=0)
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: matrix products under autocast, weights stay fp32
    eval_every: int = Field(default=200, ge=1)
    eval_tokens: int = Field(default=65536, ge=256)
    log_every: int = Field(default=10, ge=1)
    save_every_s: float = Field(default=60.0, ge=0)


@dataclass(frozen=True)
class Stage:
    """A stage with every value settled; `first` is how many steps came before it."""

    name: str
    index: int
    first: int
    context: int
    steps: int
    lr: float
    rows: int
    min_document: int

    @property
    def last(self) -> int:
        return self.first + self.steps

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.context


def stages(config: PretrainConfig) -> list[Stage]:
    out: list[Stage] = []
    for i, s in enumerate(config.stages):
        shortest = s.min_document if s.min_document is not None else (s.context if i else 0)
        rows = max(1, (s.batch_tokens or config.batch_tokens) // s.context)
        first = out[-1].last if out else 0
        name = f"{i + 1}-context-{s.context}"
        out.append(Stage(name, i, first, s.context, s.steps, s.lr or config.lr, rows, shortest))
    return out


def total_tokens(config: PretrainConfig) -> int:
    return sum(s.steps * s.tokens for s in stages(config))


@dataclass
class Pretraining:
    """Trains `model` in place. ended(stage name) is called after each stage, e.g. to keep its weights."""

    model: Model
    corpus: Corpus
    documents: np.ndarray  # to train on
    held_out: HeldOut
    config: PretrainConfig
    run: Run
    seed: int
    ended: Callable[[str], None] = lambda name: None

    def fit(self) -> None:
        c = self.config
        heads = head_counts(self.model) if c.per_head else None
        named = self.model.named_parameters()
        self.optimizer = Optimizer(named, c.optimizer, c.lr, c.betas, c.weight_decay, heads)
        start, seconds = self._restore()
        self.run.rewind(lambda e: _kept(e, start))
        self._began, self._saved = time.time() - seconds, time.time()
        plan = stages(c)
        done = sum(max(0, min(start, s.last) - s.first) * s.tokens for s in plan)
        self.model.train()
        with progress("pretrain: tokens", total_tokens(c), done) as self._bar:
            for stage in plan:
                if start < stage.last:
                    self._stage(stage, start)
        self.model.eval()

    def _stage(self, stage: Stage, start: int) -> None:
        c = self.config
        seed = self.seed * 1000 + stage.index
        batches = laid_out(self.corpus, self.documents, stage.context, stage.rows, stage.min_document, seed)
        if start <= stage.first:
            self._evaluate(stage, stage.first, "before")
        for step in range(max(0, start - stage.first), stage.steps):
            lr = stage.lr * share(step, stage.steps, round(c.warmup * stage.steps), c.decay_to, c.decay)
            figures = train_step(self.model, self.optimizer, self.corpus.tokens_N, batches(step), lr, c)
            done = stage.first + step + 1
            if not math.isfinite(figures["loss"]):
                raise UserError(f"pretrain: the loss is {figures['loss']} at step {done}; start over with a lower lr")
            if done % c.log_every == 0 or done == stage.last:
                self._log(stage, done, lr, figures)
            if done == stage.last:
                self._evaluate(stage, done, "after")
                self.ended(stage.name)
            elif done % c.eval_every == 0:
                self._evaluate(stage, done, "during")
            self._bar(self._tokens(stage, done), f"context {stage.context}, loss {figures['loss']:.3f}")
            if time.time() - self._saved > c.save_every_s:
                self._save(done)

    def _tokens(self, stage: Stage, done: int) -> int:
        before = sum(s.steps * s.tokens for s in stages(self.config)[: stage.index])
        return before + (done - stage.first) * stage.tokens

    def _log(self, stage: Stage, done: int, lr: float, figures: dict[str, float]) -> None:
        seconds = time.time() - self._began
        where = {"stage": stage.name, "step": done, "steps": stages(self.config)[-1].last, "tokens": stage.tokens}
        self.run.event("lm_step", **where, lr=lr, seconds=seconds, **figures)

    def _evaluate(self, stage: Stage, done: int, when: str) -> None:
        with precision(self.config.precision):
            found = self.held_out.measure(self.model, stage.context, self.config.eval_tokens, self.config.micro_tokens)
        where = {"stage": stage.name, "step": done, "context": stage.context, "when": when}
        self.run.event("bpb", **where, seconds=time.time() - self._began, **found)

    # --------------------------------------------------------------- checkpoints

    def _save(self, done: int) -> None:
        blob = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        blob["seconds"] = time.time() - self._began
        self.run.save(f"{CHECKPOINT}-{done}", lambda d: torch.save(blob, d / "state.pt"))
        self.run.prune(CHECKPOINT, keep=1)
        self._saved = time.time()

    def _restore(self) -> tuple[int, float]:
        found = self.run.checkpoints(CHECKPOINT)
        if not found:
            return 0, 0.0
        blob = torch.load(found[-1] / "state.pt", weights_only=True)
        self.model.load_state_dict(blob["model"])
        self.optimizer.load_state_dict(blob["optimizer"])
        return int(found[-1].name.rsplit("-", 1)[1]), blob["seconds"]


def _kept(event: dict[str, Any], start: int) -> bool:
    """False for what the run will record again when it continues after `start` steps."""
    if event["kind"] not in ("lm_step", "bpb"):
        return True
    again = event.get("when") == "before" and event["step"] >= start
    return event["step"] <= start and not again


def train_step(
    model: Model, optimizer: Optimizer, tokens_N: np.ndarray, pieces: Sequence[Piece], lr: float, c: PretrainConfig
) -> dict[str, float]:
    """One optimiser step on the pieces: the means over all predicted tokens, whatever the micro-batches."""
    mtp = model.mtp is not None and c.mtp_weight > 0
    count, ahead = predictions(pieces, 1), max(1, predictions(pieces, 2))
    loss = mtp_loss = 0.0
    for group in micro_batches(pieces, c.micro_tokens):
        block = Block.of(tokens_N, group)
        with precision(c.precision):
            losses_N, hidden_BTD = token_losses(model, block)
            total = mine = losses_N.sum() / count
            if mtp:
                further = mtp_losses(model, block, hidden_BTD).sum() / ahead
                total = total + c.mtp_weight * further
                mtp_loss += float(further.detach())
        total.backward()
        loss += float(mine.detach())
    norm = optimizer.step(lr, c.grad_clip)
    figures = {"loss": loss, "mtp_loss": mtp_loss, "grad_norm": norm}
    moved = model.balance_()
    return {**figures, "maxvio": max(moved)} if moved else figures


def precision(name: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16")
