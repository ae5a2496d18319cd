"""Loss with MXFP4 experts: quantised after training, and trained on the grid (QAT), over the unquantised loss.

Same recipe, seeds, data and steps: recipes/nano.toml's model on its own worked answers. Held-out next-token loss in
nats a token of (a) the unquantised model, (b) that model quantised afterwards, (c) a model trained under `quant`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

import nonet
from nonet.lm.trainer import LMConfig, Row, losses
from nonet.lm.trainer import train as train_lm
from nonet.model import Model
from nonet.model.init import initialise
from nonet.pipeline.recipe import load_recipe
from nonet.pipeline.stages import Context, demonstration_rows, tokenizer
from nonet.quant import QuantConfig
from nonet.run import Run

RECIPE = Path(nonet.__path__[0]).parent / "recipes" / "nano.toml"
SEEDS, STEPS, HELD_OUT, BATCH = (0, 1, 2), 250, 256, 32
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
            recipe = load_recipe([RECIPE], [f"run.seed={seed}"])
            c = Context(recipe, Run(Path(folder)))
            tokenizer(c)
            rows = demonstration_rows(c.everything())
            held_out = rows(5_000_000, HELD_OUT)
            base = _trained(c, None, rows, "plain")
            unquantised = _loss(base, held_out)
            plain.append(unquantised)
            for i, (name, quant) in enumerate(FORMATS.items()):
                after = _loss(_with(base, c, quant), held_out) - unquantised
                during = _loss(_trained(c, quant, rows, f"qat{i}"), held_out) - unquantised
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
        "steps": STEPS,
        "ptq_gap_by_seed": [round(a, 5) for a, _ in chosen],
        "qat_gap_by_seed": [round(b, 5) for _, b in chosen],
    }


def _trained(c: Context, quant: QuantConfig | None, rows: Any, stage: str) -> Model:
    config = c.recipe.model_config_for(c.tokenizer.vocab_size).model_copy(update={"quant": quant})
    model = initialise(Model(config), c.recipe.run.seed)
    assert c.recipe.cold is not None
    lm: LMConfig = c.recipe.cold.model_copy(update={"steps": STEPS, "save_every_s": 1e9})
    train_lm(model, rows, lm, c.run, stage)
    return model


def _with(model: Model, c: Context, quant: QuantConfig) -> Model:
    """The same weights, seen through `quant`."""
    other = Model(model.config.model_copy(update={"quant": quant}))
    other.load_state_dict(model.state_dict())
    return other.eval()


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
