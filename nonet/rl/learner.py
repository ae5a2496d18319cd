"""One policy update: a few minibatches over a PackedBatch, each with one global denominator.

MTP layers are carried along unchanged (no gradient reaches them here); their drift from the policy is the draft room's
business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.model import Model
from nonet.model.optimizer import Optimizer, head_counts
from nonet.rl.batch import PackedBatch, Padded, micro_batches
from nonet.rl.config import RLConfig
from nonet.rl.objective import K25

NEAR_TIES = 0.01


class InvariantError(RuntimeError):
    """Something the loop relies on is false; the message shows the offending sample."""


class Learner:
    def __init__(self, model: Model, config: RLConfig):
        self.model, self.config = model.eval(), config  # routers stand still: the sampler's choices are the learner's
        self.objective = K25(config.ratio_low, config.ratio_high, config.tau)
        trained = [(n, p) for n, p in model.named_parameters() if not n.startswith("mtp.")]
        self.optimizer = Optimizer(
            trained, config.optimizer, config.lr, config.betas, config.weight_decay, head_counts(model)
        )
        self.version = 0

    def step(self, batch: PackedBatch) -> dict[str, float]:
        """Train on the batch; version + 1. An empty batch changes nothing but the version."""
        stats = Stats()
        order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(self.version)).tolist()
        count = min(self.config.minibatches, batch.rows)
        for i in range(count):
            self._minibatch(batch, order[i::count], stats, first=i == 0)
        self.version += 1
        return stats.summary()

    def _minibatch(self, batch: PackedBatch, rows: list[int], stats: Stats, first: bool) -> None:
        tokens = sum(int(batch.mask_T[batch.starts[r] : batch.starts[r + 1]].sum()) for r in rows)
        for micro in micro_batches(batch, rows, self.config.micro_tokens):
            part = batch.padded(micro)
            where = part.mask_BT[:, 1:]
            logp_N = logprobs(self.model, part, self.config.temperature)
            behaviour_N, advantage_N = part.behaviour_BT[:, 1:][where], part.advantage_BT[:, 1:][where]
            if first:
                self._check_ratio(batch, micro, part, (logp_N.detach() - behaviour_N))
            loss = self.objective(logp_N, behaviour_N, advantage_N) / tokens
            loss.backward()
            stats.add(loss, logp_N.detach() - behaviour_N, part.version_BT[:, 1:][where] < self.version, self.objective)
        stats.lr = self._lr()
        stats.grad_norm += self.optimizer.step(stats.lr, self.config.grad_clip)
        stats.updates += 1

    def _lr(self) -> float:
        c, step = self.config, self.version
        up = min(1.0, (step + 1) / c.warmup) if c.warmup else 1.0
        return c.lr * up * (c.decay_to + (1 - c.decay_to) * max(0.0, 1 - step / c.steps))

    def _check_ratio(self, batch: PackedBatch, micro: list[int], part: Padded, log_ratio_N: Tensor) -> None:
        """On equal weights the learner must reproduce the sampler's log-probs; if not, some input differs from what was
        seen. With routed experts a share of NEAR_TIES may differ: where two experts score alike to the last bits,
        sampler and learner, which sum in another order, choose differently.
        """
        where = part.mask_BT[:, 1:]
        fresh_BT = where & (part.version_BT[:, 1:] == self.version)
        drift_BT = torch.zeros(where.shape, dtype=log_ratio_N.dtype).masked_scatter(where, log_ratio_N).abs() * fresh_BT
        allowed = int(NEAR_TIES * int(fresh_BT.sum())) if self.model.config.moe else 0
        if bool(drift_BT.isfinite().all()) and int((drift_BT > self.config.check_ratio).sum()) <= allowed:
            return
        b, t = divmod(int(drift_BT.argmax()), drift_BT.shape[1])
        raise InvariantError(
            f"{batch.names[micro[b]]}: token {t + 1} (id {int(part.tokens_BT[b, t + 1])}) was sampled at log-prob "
            f"{float(part.behaviour_BT[b, t + 1]):.4f} but scores {float(drift_BT[b, t]):.4f} away from it "
            "under the same weights"
        )


def logprobs(model: Model, part: Padded, temperature: float) -> Tensor:
    """logp_N of the masked tokens in row-major order, at the sampling temperature (law: ratio 1 on equal weights)."""
    where = part.mask_BT[:, 1:]
    hidden_ND = model(part.tokens_BT)[:, :-1][where]
    logits_NW = model.logits(hidden_ND).float()
    if temperature != 1:
        logits_NW = logits_NW / temperature
    return -F.cross_entropy(logits_NW, part.tokens_BT[:, 1:][where], reduction="none")


class Stats:
    """Sums over micro-batches; `summary` is what an rl_step event carries."""

    def __init__(self) -> None:
        self.loss = self.grad_norm = self.lr = 0.0
        self.tokens = self.masked = self.stale = self.updates = 0
        self.log_ratio = self.ratio_sum = 0.0
        self.low, self.high = 1.0, 1.0

    def add(self, loss: Tensor, log_ratio_N: Tensor, stale_N: Tensor, objective: K25) -> None:
        ratio = log_ratio_N.exp()
        self.loss += float(loss.detach())
        self.tokens += len(ratio)
        self.masked += int(((ratio < objective.ratio_low) | (ratio > objective.ratio_high)).sum())
        self.stale += int(stale_N.sum())
        self.ratio_sum += float((ratio - 1 - log_ratio_N).sum())
        self.low, self.high = min(self.low, float(ratio.min())), max(self.high, float(ratio.max()))

    def summary(self) -> dict[str, Any]:
        n, u = max(1, self.tokens), max(1, self.updates)
        return {
            "loss": self.loss / u, "grad_norm": self.grad_norm / u, "lr": self.lr, "updates": self.updates,
            "trained_tokens": self.tokens, "masked": self.masked / n, "stale": self.stale / n,
            "kl": self.ratio_sum / n, "ratio_min": self.low, "ratio_max": self.high,
        }  # fmt: skip
