"""Loss with MXFP4 experts: quantised after training, and trained on the grid (QAT), over the unquantised loss.

recipes/nano-rl.toml's model on its own worked answers: one base a seed, then the same further steps on the same rows,
plain and under `quant`. gap: held-out next-token loss, nats a token, over the plain model's unquantised one, of (a) the
plain model seen through `quant`, (b) the model that was trained under it. Both sides have seen the same tokens, so what
is left of the difference is quantisation, not luck of training.
"""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

import nonet
from nonet.lm.trainer import Row, losses
from nonet.lm.trainer import train as train_lm
from nonet.model import Model
from nonet.model.init import initialise
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import load_recipe
from nonet.pipeline.stages import demonstration_rows, tokenizer
from nonet.quant import QuantConfig
from nonet.run import Run

RECIPE = Path(nonet.__path__[0]).parent / "recipes" / "nano-rl.toml"
SEEDS, STEPS, FURTHER, HELD_OUT, BATCH = (0, 1, 2), 250, 80, 256, 32
GENTLER = 0.2  # of the base's learning rate
FORMATS = {
    "weights mxfp4, inputs mxfp8": QuantConfig(),
    "weights mxfp4, inputs mxfp8, even": QuantConfig(rule="even"),
    "weights and inputs mxfp4": QuantConfig(routed_expert_inputs="mxfp4"),
}
CHOICE = "weights mxfp4, inputs mxfp8"


def measure() -> dict[str, Any]:
    gaps: dict[str, list[tuple[float, float]]] = {name: [] for name in FORMATS}
    plain: list[float] = []
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            c = Context(load_recipe([RECIPE], [f"run.seed={seed}"]), Run(Path(folder)))
            tokenizer(c)
            rows = demonstration_rows(c.everything())
            held_out = rows(5_000_000, HELD_OUT)
            base = initialise(Model(c.recipe.model_config_for(c.tokenizer.vocab_size)), seed)
            _train(base, c, rows, "base", STEPS, 1.0)
            further = _further(base, c, rows, "plain", None)
            unquantised = _loss(further, held_out)
            plain.append(unquantised)
            for i, (name, quant) in enumerate(FORMATS.items()):
                after = _loss(_through(further, quant), held_out) - unquantised
                during = _loss(_further(base, c, rows, f"qat{i}", quant), held_out) - unquantised
                gaps[name].append((after, during))
    table = {
        name: {"after training": mean(a for a, _ in pairs), "trained on the grid": mean(b for _, b in pairs)}
        for name, pairs in gaps.items()
    }
    chosen = gaps[CHOICE]
    return {
        "ptq_gap": mean(a for a, _ in chosen),
        "qat_gap": mean(b for _, b in chosen),
        "loss": mean(plain),
        "gaps": table,
        "seeds": len(SEEDS),
        "steps": [STEPS, FURTHER],
        "gaps_by_seed": {n: [[round(a, 5), round(b, 5)] for a, b in pairs] for n, pairs in gaps.items()},
    }


def _train(model: Model, c: Context, rows: Any, stage: str, steps: int, gentle: float) -> None:
    assert c.recipe.cold is not None
    update = {"steps": steps, "save_every_s": 1e9, "lr": gentle * c.recipe.cold.lr}
    train_lm(model, rows, c.recipe.cold.model_copy(update=update), c.run, stage)


def _further(base: Model, c: Context, rows: Any, stage: str, quant: QuantConfig | None) -> Model:
    """A copy of the base after further steps on rows it has not seen, under `quant` if that is given."""
    model = _through(base, quant) if quant else copy.deepcopy(base)
    _train(model.train(), c, lambda first, count: rows(1_000_000 + first, count), stage, FURTHER, GENTLER)
    return model


def _through(model: Model, quant: QuantConfig) -> Model:
    """The same weights, seen through `quant`."""
    other = Model(model.config.model_copy(update={"quant": quant}))
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def _loss(model: Model, rows: list[Row]) -> float:
    model.eval()
    ordered = sorted(rows, key=lambda r: len(r.tokens))
    total = count = 0.0
    for i in range(0, len(ordered), BATCH):
        part = ordered[i : i + BATCH]
        targets = sum(sum(r.mask[1:]) for r in part)
        total += float(losses(model, part, False)[0]) * targets
        count += targets
    return total / count
