"""A draft out of the MTP layer at laptop size: its gain over the untouched layer, and what each choice is worth.

recipes/nano-rl.toml's model after its cold start (quick profile), three seeds. Every draft is tuned on the same batches
of answers that the backbone samples to training tasks, and measured by real verification on held-out ones: temperature
1, seven tokens drafted from the draft's own distribution; acceptance length is tokens a verifying step, the bonus token
included. Compared: the untouched MTP layer and the tuned one (`gain`); unroll {1, 7} x fusion {frozen at [0 0 I],
trained} x loss {KL, -log overlap}; the best of these with its experts on the MX grid, trained there and rounded
afterwards; and on one backbone what it costs not to have the corpus: a draft from the co-trained MTP, from an MTP added
afterwards, from a random EAGLE-3 layer. Everything is kept under runs/draft-nano, and a run that was stopped continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nonet.bench.draft_nano_lab import BATCH, DRAFTED, LEARNT, MEASURED, STEPS, Cell, result
from nonet.ops.overlap_rules import Kind

SEEDS = (0, 1, 2)
STUDENT = 4.303  # 97.5% of Student's t, two degrees of freedom: three seeds
LOSSES: tuple[Kind, ...] = ("kl", "overlap")


def tuned(unroll: int = 7, fusion: bool = True, loss: Kind = "overlap") -> Cell:
    return Cell(f"unroll {unroll}, fusion {'trained' if fusion else 'frozen'}, {loss}", unroll, fusion, loss)


UNTOUCHED, TUNED = Cell("untouched", tuned=False), tuned()  # TUNED is K3's recipe
FACTORIAL = [tuned(unroll, fusion, loss) for unroll in (1, 7) for fusion in (False, True) for loss in LOSSES]
FACTORS: dict[str, tuple[str, Any, Any]] = {
    "unroll 7 over 1": ("unroll", 7, 1),
    "fusion trained over frozen": ("fusion", True, False),
    "overlap over KL": ("loss", "overlap", "kl"),
}
STARTS = (
    UNTOUCHED,
    TUNED,
    Cell("added, untouched", start="added", tuned=False),
    Cell("added, tuned", start="added"),
    Cell("random EAGLE-3, overlap", start="random"),
    Cell("random EAGLE-3, hybrid", start="random", loss="hybrid"),
)  # fmt: skip

Lengths = Mapping[str, Sequence[float]]  # of a cell's drafts, by seed


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    lengths: dict[str, list[float]] = {cell.name: [] for cell in (UNTOUCHED, *FACTORIAL)}
    for seed in SEEDS:
        for cell in (UNTOUCHED, *FACTORIAL):
            lengths[cell.name].append(result(seed, cell)["length"])
    best = max(FACTORIAL, key=lambda cell: mean(lengths[cell.name]))
    for cell in on_the_grid(best):
        lengths[cell.name] = [result(seed, cell)["length"] for seed in SEEDS]
    starts = {cell.name: of_one(result(SEEDS[0], cell)) for cell in STARTS}
    gain = across([b / a for a, b in zip(lengths[UNTOUCHED.name], lengths[TUNED.name], strict=True)])
    print_tables(lengths, starts)
    return {
        "gain": gain["mean"], "gain_interval": [gain["low"], gain["high"]],
        "lengths": {name: across(values) for name, values in lengths.items()},
        "factors": factors(lengths), "best": best.name, "corpus": starts,
        "domains": {cell.name: domains(cell) for cell in (UNTOUCHED, TUNED)},
        "positions": {cell.name: positions(cell) for cell in (UNTOUCHED, TUNED)},
        "seeds": len(SEEDS), "drafted": DRAFTED, "tuning_tokens": STEPS * BATCH,
        "tasks": {"learnt": LEARNT, "measured": MEASURED},
        "lengths_by_seed": {name: [round(v, 4) for v in values] for name, values in lengths.items()},
    }  # fmt: skip


def on_the_grid(best: Cell) -> tuple[Cell, Cell]:
    """The cell with its experts' weights in MXFP4 and inputs in MXFP8: rounded after training, and trained so."""
    trained = replace(best, name=f"{best.name}, QAT", quantised=True)
    return replace(trained, name=f"{best.name}, rounded", tuned=False, rounded_from=best.name), trained


# ------------------------------------------------------------------------------------ figures


def across(values: Sequence[float]) -> dict[str, float]:
    """Mean over seeds with its 95% interval (Student's t)."""
    half = STUDENT * stdev(values) / math.sqrt(len(values))
    return {"mean": mean(values), "low": mean(values) - half, "high": mean(values) + half}


def factors(lengths: Lengths) -> dict[str, dict[str, float]]:
    """What a choice multiplies acceptance length by, all else equal: of a seed the geometric mean of four pairs."""
    out = {}
    for name, (field, this, that) in FACTORS.items():
        pairs = [(cell.name, with_other(cell, field, that).name) for cell in FACTORIAL if getattr(cell, field) == this]
        logs = [[math.log(lengths[a][seed] / lengths[b][seed]) for a, b in pairs] for seed in range(len(SEEDS))]
        out[name] = across([math.exp(mean(of_seed)) for of_seed in logs])
    return out


def with_other(cell: Cell, field: str, value: Any) -> Cell:
    return tuned(**{"unroll": cell.unroll, "fusion": cell.fusion, "loss": cell.loss, field: value})


def of_one(found: Mapping[str, Any]) -> dict[str, float]:
    """Of one backbone; the interval resamples tasks."""
    return {"mean": found["length"], "low": found["low"], "high": found["high"], "parameters": found["parameters"]}


def domains(cell: Cell) -> dict[str, dict[str, float]]:
    found = [result(seed, cell)["domains"] for seed in SEEDS]
    return {name: across([f[name]["length"] for f in found]) for name in found[0]}


def positions(cell: Cell) -> list[float]:
    """Share of drafts whose first k tokens all stood, mean over seeds."""
    found = [result(seed, cell)["positions"] for seed in SEEDS]
    return [round(mean(shares), 4) for shares in zip(*found, strict=True)]


# ------------------------------------------------------------------------------------ text


def print_tables(lengths: Lengths, starts: Mapping[str, Mapping[str, float]]) -> None:
    console = Console(stderr=True, width=110, highlight=False)
    title = f"acceptance length at temperature 1, {DRAFTED} drafted, bonus token included"
    table = Table("draft", "length", "95% over seeds", "over untouched", title=title)
    for name, values in lengths.items():
        ratio = across([b / a for a, b in zip(lengths[UNTOUCHED.name], values, strict=True)])
        table.add_row(name, *_cells(across(values)), " ".join(_cells(ratio)))
    console.print(table)
    table = Table(
        "draft", "length", "95% over tasks", "parameters", title=f"the same on one backbone (seed {SEEDS[0]})"
    )
    for name, found in starts.items():
        table.add_row(name, *_cells(found), f"{found['parameters']:,}")
    console.print(table)


def _cells(f: Mapping[str, float]) -> tuple[str, str]:
    return f"{f['mean']:.2f}", f"[{f['low']:.2f}, {f['high']:.2f}]"
