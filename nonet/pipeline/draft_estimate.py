"""What making a draft will take, said before anything is made: disk, memory, and time by a few seconds of measuring."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from nonet.chat import prompt
from nonet.draft.batch import observed
from nonet.draft.loss import Teacher
from nonet.draft.model import started
from nonet.draft.store import bytes_of
from nonet.draft.train import train_step
from nonet.engine import Engine
from nonet.model.optimizer import Optimizer
from nonet.pipeline.drafting import Job
from nonet.types import Request, Sampling

PROBED = 16  # tokens each row of the probe writes
LEARNT = 512  # tokens it trains on
STATES = 4  # copies of a draft's weights in training: themselves, gradients, two moments


@dataclass(frozen=True)
class Estimate:
    """Upper ends: every answer as long as it may be. written, read: tokens of answers, and with their prompts."""

    conversations: int
    written: int
    read: int
    disk: int
    memory: int
    answers_s: float
    features_s: float
    training_s: float

    @staticmethod
    def of(job: Job) -> Estimate:
        recipe, model = job.recipe, job.target
        talks = job.wanted
        written = sum(c.turns for c in talks) * recipe.answers.max_tokens
        sample = talks[:: max(1, len(talks) // 64)]
        lengths = [len(prompt(job.tokenizer, c.messages[:1], c.tools).tokens) for c in sample]
        read = written + len(talks) * sum(lengths) // len(lengths)
        config = job.draft_config(recipe.draft.vocabulary or None)
        disk = bytes_of(read, model.config.d_model, config.taps, model.config.layers, recipe.draft.features)
        draft = sum(p.numel() for p in started(config, model, _ids(config.draft_vocab)).parameters())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        decode_s, capture_s, step_s = Probe(job).rates()
        unrolls = sum(recipe.train.at(step).unroll for step in range(recipe.train.steps))
        return Estimate(
            len(talks), written, read, disk, 2 * weights + STATES * 4 * draft,
            written * decode_s, read * capture_s, unrolls * step_s / recipe.train.unroll,
        )  # fmt: skip

    def text(self) -> str:
        minutes = [s / 60 for s in (self.answers_s, self.features_s, self.training_s)]
        return (
            f"estimate: {self.conversations} conversations; at most {self.written:,} tokens of answers, "
            f"{self.disk / 1e9:.2f} GB of features on disk, {self.memory / 1e9:.1f} GB of memory, and activations; "
            f"answers {minutes[0]:.0f}, features {minutes[1]:.0f}, training {minutes[2]:.0f} minutes at most, "
            "as measured here just now"
        )


class Probe:
    def __init__(self, job: Job):
        self.job = job

    def rates(self) -> tuple[float, float, float]:
        """Seconds for a token of an answer, for a token of features, for a training step."""
        return self._decode(), *self._learn()

    def _decode(self) -> float:
        job, rows = self.job, self.job.recipe.answers.batch
        engine = Engine(job.target, rows, weights=job.recipe.draft.decode)
        for i in range(rows):
            engine.submit(Request(str(i), (1, 2, 3, 4), PROBED, (), Sampling(1.0)))
        engine.step()
        began = time.perf_counter()
        engine.run()
        return (time.perf_counter() - began) / (rows * (PROBED - 1))

    def _learn(self) -> tuple[float, float]:
        job, d = self.job, self.job.recipe.draft
        config = job.draft_config(d.vocabulary or None)
        draft = started(config, job.target, _ids(config.draft_vocab))
        n = min(d.batch_tokens, LEARNT)
        tokens_BT = torch.randint(0, job.target.config.vocab_size, (1, n))
        with torch.autocast("cpu", torch.bfloat16, enabled=d.bf16):
            began = time.perf_counter()
            batch = observed(job.target, config.taps, tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool))
            capture = (time.perf_counter() - began) / n
        c, teacher = job.recipe.train, Teacher(job.target, draft.d2t_W, job.recipe.train.temperature)
        optimizer = Optimizer(draft.named_parameters(), "adamw", 0.0, c.betas, 0.0, None)
        batch = replace(batch.to(torch.float32), lse_BT=torch.zeros(1, n))  # a store has it
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            train_step(draft, teacher, optimizer, [batch], 0.0, c)
        step = (time.perf_counter() - began) / n * d.batch_tokens * d.micro_batches
        return capture, step


def _ids(words: int | None) -> torch.Tensor | None:
    return None if words is None else torch.arange(words)
