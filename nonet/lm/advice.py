"""How large a model this machine can pretrain in a given time, from a few seconds of real training steps.

Rule: a compute-optimal run sees about 20 tokens for every active parameter (the fit of Hoffmann et al. 2022). Speed is
measured twice, on the recipe's own model and on the size that the first figure suggests, and interpolated between as a
power of the size: small models waste more of the machine than large ones, so "twice the size, half the speed" is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch

from nonet.lm.batches import Piece
from nonet.lm.pretrain import PretrainConfig, stages, total_tokens, train_step
from nonet.model import Model, ModelConfig, hf
from nonet.model.init import initialise
from nonet.model.optimizer import Optimizer, head_counts
from nonet.types import UserError

TOKENS_PER_PARAMETER = 20
_BYTES_PER_PARAMETER = 20  # weight, gradient, two moments, and as much again for activations of a small batch


@dataclass(frozen=True)
class Speed:
    active: int
    tokens_per_s: float


@dataclass(frozen=True)
class Advice:
    """`mine` is the recipe's model; `advised` the compute-optimal one of the same shape for the time given."""

    mine: Speed
    seconds: float  # that the recipe's tokens will take
    advised: ModelConfig
    active: int
    tokens: int
    measured: Speed  # the second probe


def advise(config: ModelConfig, pretrain: PretrainConfig, hours: float, probe_s: float) -> Advice:
    mine = probe(config, pretrain, probe_s)
    sizes = list(widths(config))
    first = _largest(sizes, mine, -1.0, hours)
    other = probe(first[1], pretrain, probe_s)
    slope = -1.0
    if other.active != mine.active:
        slope = math.log(other.tokens_per_s / mine.tokens_per_s) / math.log(other.active / mine.active)
    active, advised = _largest(sizes, other, min(-0.2, slope), hours)
    tokens = TOKENS_PER_PARAMETER * active
    return Advice(mine, total_tokens(pretrain) / mine.tokens_per_s, advised, active, tokens, other)


def _largest(sizes: list[tuple[int, ModelConfig]], known: Speed, slope: float, hours: float) -> tuple[int, ModelConfig]:
    """The largest size whose 20 tokens a parameter fit, if speed goes as size ** slope through the known point."""

    def seconds(active: int) -> float:
        return TOKENS_PER_PARAMETER * active / (known.tokens_per_s * (active / known.active) ** slope)

    fitting = [s for s in sizes if seconds(s[0]) <= hours * 3600]
    return fitting[-1] if fitting else sizes[0]


def widths(config: ModelConfig) -> Iterator[tuple[int, ModelConfig]]:
    """(active parameters, config) of the same model wider and narrower: heads of the same size, more or fewer of them;
    ascending, up to what this machine's memory holds for training.
    """
    room = psutil.virtual_memory().available
    step = config.gqa_kv_heads if config.kv_heads else 1
    for n in range(1, 4097):
        heads = n * step
        # ever coarser steps: sizes a few percent apart are the same advice
        if heads > 16 * step and heads % max(1, 1 << (heads.bit_length() - 4)):
            continue
        wider = widened(config, heads)
        cost = hf.empty(wider).cost
        if n > 1 and (cost.total + cost.mtp) * _BYTES_PER_PARAMETER > room:
            return
        yield cost.active, wider


def widened(config: ModelConfig, heads: int) -> ModelConfig:
    """The config with this many heads; every width that is not a head's own scales with them."""
    ratio = heads / config.heads

    def scaled(width: int, multiple: int) -> int:
        return max(multiple, round(width * ratio / multiple) * multiple) if width else 0

    values = config.model_dump()
    values |= {"heads": heads, "d_model": config.d_model // config.heads * heads, "d_ff": scaled(config.d_ff, 8)}
    values |= {k: scaled(values[k], 8) for k in ("q_lora_rank", "kv_lora_rank")}
    if config.moe is not None:
        moe = values["moe"]
        values["moe"] = moe | {"d_ff": scaled(moe["d_ff"], 32), "latent": scaled(moe["latent"], 32)}
    return ModelConfig.model_validate(values)


def probe(config: ModelConfig, pretrain: PretrainConfig, seconds: float) -> Speed:
    """Tokens a second of training steps on random tokens, at the first stage's context and batch; the first step is
    warm-up, and at least one more is measured.
    """
    cost = hf.empty(config).cost
    need = (cost.total + cost.mtp) * _BYTES_PER_PARAMETER
    if need > psutil.virtual_memory().available:
        raise UserError(
            f"model: training {cost.total:,} parameters takes about {need >> 30} GB, more than this machine has free; "
            "make it smaller"
        )
    model = initialise(Model(config), 0).train()
    heads = head_counts(model) if pretrain.per_head else None
    c = pretrain
    optimizer = Optimizer(model.named_parameters(), c.optimizer, c.lr, c.betas, c.weight_decay, heads)
    stage = stages(pretrain)[0]
    generator = torch.Generator().manual_seed(0)
    tokens_N = torch.randint(config.vocab_size, (stage.tokens,), generator=generator).numpy()
    pieces: list[Piece] = [(r * stage.context, (r + 1) * stage.context) for r in range(stage.rows)]
    train_step(model, optimizer, tokens_N, pieces, c.lr, c)
    began, steps = time.perf_counter(), 0
    while not steps or time.perf_counter() - began < seconds:
        train_step(model, optimizer, tokens_N, pieces, c.lr, c)
        steps += 1
    return Speed(cost.active, steps * stage.tokens / (time.perf_counter() - began))
