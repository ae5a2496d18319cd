"""Supervised training that survives `kill -9`: every batch is a pure function of its step.

Loss: mean cross-entropy over the masked-in tokens, plus mtp_weight times the same two tokens ahead (DeepSeek-V3 / K3
multi-token prediction). Optimiser: per-head Muon and AdamW (`model.optimizer`), linear warm-up, linear or cosine decay.
Pretraining on a corpus is `lm.pretrain`; this is for rows that somebody makes, such as demonstrations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from nonet.config import Config
from nonet.lm.schedule import Decay, share
from nonet.model import Model
from nonet.model.optimizer import Optimizer, head_counts
from nonet.progress import progress
from nonet.run import Run


class LMConfig(Config):
    steps: int = Field(default=900, ge=1)
    batch: int = Field(default=16, ge=1)
    optimizer: Literal["muon", "adamw"] = "muon"
    per_head: bool = True  # Muon orthogonalises q, k and v head by head; False: each projection whole
    lr: float = Field(default=4e-3, gt=0)
    warmup: int = Field(default=30, ge=0)
    decay: Decay = "linear"
    decay_to: float = Field(default=0.05, ge=0, le=1)  # learning rate at the end, as a share of lr
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    mtp_weight: float = Field(default=0.1, ge=0)
    block: int = Field(default=16, ge=1)  # batches drawn together and grouped by length
    save_every_s: float = 30.0


@dataclass(frozen=True)
class Row:
    """One training sequence; mask is True on tokens to be predicted."""

    tokens: Sequence[int]
    mask: Sequence[bool]


Rows = Callable[[int, int], list[Row]]  # (first index, count) -> rows; a pure function


def train(model: Model, rows: Rows, config: LMConfig, run: Run, stage: str) -> None:
    """Train in place, logging to the run; continues from the stage's last checkpoint if there is one."""
    optimizer = optimizer_for(model, config)
    start, seconds = _restore(model, optimizer, run, stage)
    run.rewind(lambda e: e["kind"] != "lm_step" or e["stage"] != stage or e["step"] <= start)
    began, saved = time.time() - seconds, time.time()
    batches: list[list[Row]] = []
    model.train()
    with progress(f"{stage}: training", config.steps, start) as bar:
        for step in range(start, config.steps):
            if not batches or step % config.block == 0:
                batches = _block(rows, step // config.block, config)
            lr = config.lr * schedule(step, config)
            loss, mtp, tokens = _step(model, optimizer, batches[step % config.block], lr, config)
            if step % 10 == 9 or step == config.steps - 1:
                run.event(
                    "lm_step", stage=stage, step=step + 1, steps=config.steps, loss=loss, mtp_loss=mtp, tokens=tokens,
                    lr=lr, seconds=time.time() - began,
                )  # fmt: skip
            bar(step + 1, f"loss {loss:.3f}")
            if time.time() - saved > config.save_every_s:
                _save(model, optimizer, run, stage, step + 1, time.time() - began)
                saved = time.time()
    model.eval()


def optimizer_for(model: Model, config: LMConfig) -> Optimizer:
    heads = head_counts(model) if config.per_head else None
    named = model.named_parameters()
    return Optimizer(named, config.optimizer, config.lr, config.betas, config.weight_decay, heads)


def schedule(step: int, config: LMConfig) -> float:
    """Share of the peak learning rate: linear up over `warmup`, then down to `decay_to`."""
    return share(step, config.steps, config.warmup, config.decay_to, config.decay)


def losses(model: Model, batch: Sequence[Row], mtp: bool) -> tuple[Tensor, Tensor | None]:
    """(next-token loss, two-ahead loss), each the mean over its masked-in targets."""
    tokens_BT, mask_BT = pad(batch)
    # Only routers need to know what is padding: they observe the load of real tokens.
    counts_B = torch.tensor([len(r.tokens) for r in batch]) if model.config.moe else None
    hidden_BTD = model(tokens_BT, counts_B=counts_B)
    target = mask_BT[:, 1:]
    if not bool(target.any()):  # a mean over nothing would be NaN
        return hidden_BTD.sum() * 0, None
    logits_NW = model.logits(hidden_BTD[:, :-1][target])
    loss = F.cross_entropy(logits_NW.float(), tokens_BT[:, 1:][target])
    if not mtp or not bool(mask_BT[:, 2:].any()):
        return loss, None
    ahead = mask_BT[:, 2:]
    mtp_logits_NW = model.mtp_logits(tokens_BT, hidden_BTD, counts_B)[:, :-1][ahead]
    return loss, F.cross_entropy(mtp_logits_NW.float(), tokens_BT[:, 2:][ahead])


def pad(batch: Sequence[Row]) -> tuple[Tensor, Tensor]:
    longest = max(len(r.tokens) for r in batch)
    tokens = torch.tensor([[*r.tokens, *([0] * (longest - len(r.tokens)))] for r in batch])
    mask = torch.tensor([[*r.mask, *([False] * (longest - len(r.mask)))] for r in batch])
    return tokens, mask


def _step(
    model: Model, optimizer: Optimizer, batch: list[Row], lr: float, config: LMConfig
) -> tuple[float, float, int]:
    loss, mtp = losses(model, batch, model.mtp is not None and config.mtp_weight > 0)
    total = loss if mtp is None else loss + config.mtp_weight * mtp
    total.backward()
    optimizer.step(lr, config.grad_clip)
    model.balance_()
    return loss.item(), 0.0 if mtp is None else mtp.item(), sum(len(r.tokens) for r in batch)


def _block(rows: Rows, block: int, config: LMConfig) -> list[list[Row]]:
    """`block` batches drawn together, grouped by length to save padding, in a seeded order."""
    count = config.block * config.batch
    drawn = sorted(rows(block * count, count), key=lambda r: len(r.tokens))
    order = torch.randperm(config.block, generator=torch.Generator().manual_seed(block)).tolist()
    return [drawn[i * config.batch : (i + 1) * config.batch] for i in order]


def _save(model: Model, optimizer: Optimizer, run: Run, stage: str, step: int, seconds: float) -> None:
    blob = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seconds": seconds}
    run.save(f"{stage}-{step}", lambda d: torch.save(blob, d / "state.pt"))
    run.prune(stage, keep=1)


def _restore(model: Model, optimizer: Optimizer, run: Run, stage: str) -> tuple[int, float]:
    found = run.checkpoints(stage)
    if not found:
        return 0, 0.0
    blob = torch.load(Path(found[-1]) / "state.pt", weights_only=True)
    model.load_state_dict(blob["model"])
    optimizer.load_state_dict(blob["optimizer"])
    return int(found[-1].name.rsplit("-", 1)[1]), blob["seconds"]
