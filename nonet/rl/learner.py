"""One policy update: a few minibatches over a PackedBatch, each with one global denominator.

The learner knows neither where advantages come from nor which objective turns them into a loss. MTP layers are carried
along unchanged (no gradient reaches them here); their drift from the policy is the draft room's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.model import Model
from nonet.model.optimizer import Optimizer, head_counts
from nonet.rl.ages import Ages
from nonet.rl.batch import PackedBatch, Part
from nonet.rl.config import RLConfig
from nonet.rl.invariants import InvariantError, check_columns, check_count, check_finite, check_norm, check_ratio
from nonet.rl.lora import Lora
from nonet.rl.objective import Objective, Tokens
from nonet.rl.packing import micro_batches

__all__ = ["InvariantError", "Learner"]

Teacher = Callable[[Part, Sequence[str]], Any]


class Learner:
    """objective: None takes the one that config names. teacher: makes Tokens.teacher of a part of the batch and its
    rows' names.
    """

    def __init__(self, model: Model, config: RLConfig, objective: Objective | None = None):
        self.model, self.config = model.eval(), config  # routers stand still: the sampler's choices are the learner's
        self.objective: Objective = objective or config.chosen_objective
        self.teacher: Teacher | None = None
        self.lora = Lora(model, config.lora) if config.lora is not None else None
        trained = self.lora.factors.items() if self.lora is not None else model.named_parameters()
        trained = [(n, p) for n, p in trained if not n.startswith("mtp.")]
        self.optimizer = Optimizer(
            trained, config.optimizer, config.lr, config.betas, config.weight_decay, head_counts(model)
        )
        self.version = 0

    def step(self, batch: PackedBatch) -> dict[str, Any]:
        """Train on the batch; version + 1. An empty batch changes nothing but the version."""
        check_columns(batch)
        stats = Stats()
        order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(self.version)).tolist()
        count = min(self.config.minibatches, batch.rows)
        splits = [order[i::count] for i in range(count)]
        proximal_T = self._proximal(batch, [r for split in splits[1:] for r in split])
        for i, rows in enumerate(splits):
            self._minibatch(batch, rows, stats, None if i == 0 else proximal_T)
        self.version += 1
        return stats.summary()

    def _minibatch(self, batch: PackedBatch, rows: list[int], stats: Stats, proximal_T: Tensor | None) -> None:
        """proximal_T: log-probs under the weights the iteration began with; None: those are the weights now."""
        denominator = len(rows) if self.objective.per == "sequence" else batch.trained_in(rows)
        counted = 0
        for part in self._parts(batch, rows):
            tokens = self._tokens(batch, part, proximal_T)
            index_N, log_ratio_N = part.index_N, tokens.logp_N.detach() - tokens.behaviour_N
            if stats.updates == 0:
                moe = self.model.config.moe is not None
                clean_N = self._clean(tokens.row_N, batch.version_T[index_N])
                check_ratio(batch, index_N[clean_N], log_ratio_N[clean_N], self.version, self.config.check_ratio, moe)
            loss = self.objective(tokens) / denominator
            check_finite(batch, index_N, loss.detach(), log_ratio_N)
            loss.backward()
            counted += len(index_N)
            stats.add(loss, tokens, self.objective.clipped(tokens), self.version - batch.version_T[index_N])
        check_count(counted, batch.trained_in(rows), [batch.names[r] for r in rows])
        stats.lr = self._lr()
        norm = self._update(stats.lr)
        check_norm(norm, [batch.names[r] for r in rows])
        stats.grad_norm += norm
        stats.updates += 1

    def _parts(self, batch: PackedBatch, rows: list[int]) -> Iterator[Part]:
        c = self.config
        for micro in micro_batches(batch, rows, c.micro_tokens, c.share_prompts):
            yield batch.part(micro, c.share_prompts)

    def _update(self, lr: float) -> float:
        """Move the trained parameters along the gradient that has gathered; returns its norm."""
        if self.lora is None:
            return self.optimizer.step(lr, self.config.grad_clip)
        self.lora.gather()
        norm = self.optimizer.step(lr, self.config.grad_clip)
        self.lora.merge()
        return norm

    def _tokens(self, batch: PackedBatch, part: Part, proximal_T: Tensor | None) -> Tokens:
        """What the objective sees of a part; where it may ask for them, gradients of its inputs are kept."""
        needs, index_N = self.objective.needs, part.index_N
        logp_N, logits_NW = scores(self.model, part, self.config.temperature)
        for leaf in (logp_N, logits_NW) if "logits" in needs else (logp_N,):
            leaf.retain_grad()
        proximal_N = None
        if "proximal" in needs:
            proximal_N = logp_N.detach() if proximal_T is None else proximal_T[index_N]
        return Tokens(
            logp_N, batch.behaviour_T[index_N], batch.advantage_T[index_N], part.row_N, proximal_N,
            logits_NW if "logits" in needs else None,
            self.teacher(part, [batch.names[r] for r in part.rows]) if self.teacher is not None else None,
        )  # fmt: skip

    def _clean(self, row_N: Tensor, version_N: Tensor) -> Tensor:
        """Tokens drawn from memory of one version: with on_resume = "reuse" not those of rows that mix versions."""
        if self.config.on_resume == "reprefill" or not len(row_N):
            return torch.ones_like(row_N, dtype=torch.bool)
        oldest_R = version_N.new_full((int(row_N.max()) + 1,), self.version).scatter_reduce(0, row_N, version_N, "amin")
        return oldest_R[row_N] == version_N

    @torch.no_grad()
    def _proximal(self, batch: PackedBatch, rows: list[int]) -> Tensor | None:
        """Log-probs of the rows' tokens under the weights now, flat [T]: one forward where it is asked for."""
        if "proximal" not in self.objective.needs or not rows:
            return None
        out_T = torch.full_like(batch.behaviour_T, torch.nan)
        for part in self._parts(batch, rows):
            out_T[part.index_N] = scores(self.model, part, self.config.temperature)[0]
        return out_T

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self.lora is None else {**state, "lora": self.lora.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lora is not None:
            self.lora.load_state_dict(state["lora"])

    def _lr(self) -> float:
        c, step = self.config, self.version
        up = min(1.0, (step + 1) / c.warmup) if c.warmup else 1.0
        return c.lr * up * (c.decay_to + (1 - c.decay_to) * max(0.0, 1 - step / c.steps))


def scores(model: Model, part: Part, temperature: float) -> tuple[Tensor, Tensor]:
    """logp_N of the trained tokens, row by row, and logits_NW they come from, both at the sampling temperature (law:
    ratio 1 on equal weights).
    """
    logits_NW = model.logits(model(part.tokens_1L, tree=part.tree)[0, part.from_N]).float()
    if temperature != 1:
        logits_NW = logits_NW / temperature
    return -F.cross_entropy(logits_NW, part.target_N, reduction="none"), logits_NW


class Stats:
    """Sums over micro-batches; `summary` is what an rl_step event carries."""

    def __init__(self) -> None:
        self.loss = self.grad_norm = self.lr = 0.0
        self.tokens = self.clipped = self.stale = self.updates = 0
        self.ratio_sum = 0.0
        self.low, self.high = 1.0, 1.0
        self.ages = Ages()

    def add(self, loss: Tensor, tokens: Tokens, clipped_N: Tensor, age_N: Tensor) -> None:
        """After the backward pass, when `tokens` holds gradients."""
        log_ratio_N = tokens.logp_N.detach() - tokens.behaviour_N
        ratio_N = log_ratio_N.exp()
        self.loss += float(loss.detach())
        self.tokens += len(ratio_N)
        self.clipped += int(clipped_N.sum())
        self.stale += int((age_N > 0).sum())
        self.ratio_sum += float((ratio_N - 1 - log_ratio_N).sum())
        self.low, self.high = min(self.low, float(ratio_N.min())), max(self.high, float(ratio_N.max()))
        self.ages.add(age_N, ratio_N, clipped_N, pull(tokens))

    def summary(self) -> dict[str, Any]:
        n, u = max(1, self.tokens), max(1, self.updates)
        return {
            "loss": self.loss / u, "grad_norm": self.grad_norm / u, "lr": self.lr, "updates": self.updates,
            "trained_tokens": self.tokens, "masked": self.clipped / n, "stale": self.stale / n,
            "kl": self.ratio_sum / n, "ratio_min": self.low, "ratio_max": self.high, "ages": self.ages.rows(),
        }  # fmt: skip


def pull(tokens: Tokens) -> Tensor:
    """How hard each token pulls, [N]: |dL / dlog pi|, or the length of dL / dlogits where the loss needs logits."""
    if tokens.logits_NW is not None:
        assert tokens.logits_NW.grad is not None
        return torch.linalg.vector_norm(tokens.logits_NW.grad, dim=-1)
    assert tokens.logp_N.grad is not None
    return tokens.logp_N.grad.abs()
