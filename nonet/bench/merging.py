"""Nine experts to one: what each way of merging them keeps, at equal tokens, over seeds of recipes/nano.toml.

retention    (merged - cold) / (expert - cold) on sampled held-out reward, a mean over cells, and its worst cell, of the
             run's own student (on-policy distillation, sampled token) and of each rival (merging_rivals.py)
over_best    the student's mean over domains less the best single expert's, at each level: an expert plays all domains
             at the level it was trained for
levels       of the student: whether tokens part level by level, low's share of max's, whether max earns no less
gains        of the experts, each over the cold start on its cell
figures that count are the worst over seeds. --only 0 (or 1, 2) measures one seed, --only runs trains without rivals.
Everything is kept under runs/merging: what is there is not made again, and a run that was killed continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from nonet.bench.merging_rivals import RIVALS, rival
from nonet.bench.qat import RECIPE
from nonet.model import Model, hf
from nonet.pipeline.cells import Cell, cells_of, read_played
from nonet.pipeline.context import Context
from nonet.pipeline.experts import model_of
from nonet.pipeline.main_job import run_recipe
from nonet.pipeline.recipe import Recipe, load_recipe
from nonet.rl.evaluate import evaluate
from nonet.rl.retention import Played, by_cell, retention, separation
from nonet.run import Run, write_atomic
from nonet.types import UserError

FOLDER = Path("runs/merging")
SEEDS = ("0", "1", "2")
MODE = "sampled"
STUDENT = "on-policy"

ByCell = dict[tuple[str, str], Played]


def measure(only: Sequence[str] = ()) -> dict[str, Any]:
    if unknown := [name for name in only if name not in (*SEEDS, "runs")]:
        raise UserError(f"bench merging: only {unknown[0]!r}: use runs, or seeds {', '.join(SEEDS)}")
    seeds = [s for s in only if s != "runs"] or list(SEEDS)
    found = [
        of_seed(load_recipe([RECIPE.with_name("nano.toml")], [f"run.seed={s}"]), FOLDER / f"seed-{s}", "runs" in only)
        for s in seeds
    ]
    print_table(found)
    return {**worst(found), "seeds": dict(zip(seeds, found, strict=True))}


def of_seed(recipe: Recipe, out: Path, alone: bool = False) -> dict[str, Any]:
    """alone: without the rivals."""
    if recipe.experts is None:
        raise UserError("bench merging: the recipe has no [experts], so there is nothing to merge")
    began = time.time()
    run_recipe(recipe, out)
    if alone:
        return {"minutes": (time.time() - began) / 60}
    c, tokens = Context(recipe, Run(out)), 0
    tokens = sum(int(e["tokens"]) for e in c.run.events("rl_step"))
    cells = cells_of(recipe)
    cold, expert, student = (
        {x.key: read_played(out, n, x, MODE) for x in cells} for n in ("cold", "expert", "distill")
    )
    ways: dict[str, tuple[ByCell, int]] = {STUDENT: (student, tokens)}
    for name in RIVALS:
        ways[name] = rival_played(name, c, tokens)
    return {
        "ways": {name: {**kept(cold, expert, played), "tokens": n} for name, (played, n) in ways.items()},
        "gains": {":".join(k): _gain(r) for k, r in retention(_rewards(cold, expert, student))[0].items()},
        "over_best": over_best(c, expert, student),
        "levels": separation(student),
        "minutes": sum(json.loads(f.read_text())["seconds"] for f in (out / "stages").glob("*.json")) / 60,
    }


def rival_played(name: str, c: Context, tokens: int) -> tuple[ByCell, int]:
    """Its held-out attempts and tokens; made and played now if they are not there."""
    folder = c.root / "rivals" / name
    file = folder / "played.json"
    if not file.exists():
        mine = Context(c.recipe, Run(folder), part_of=c.root)
        model, took = rival(name, mine, tokens)
        played = {":".join(x.key): attempts(model, mine, x).to_json() for x in cells_of(c.recipe)}
        write_atomic(file, json.dumps({"tokens": took, "played": played}))
    found = json.loads(file.read_text())
    return {tuple(k.split(":")): Played(**p) for k, p in found["played"].items()}, found["tokens"]


def attempts(model: Model, c: Context, cell: Cell) -> Played:
    rl, setting = c.recipe.rl, cell.setting(c)
    done = evaluate(model, setting, range(c.recipe.eval.prompts), 1.0, rl.max_tokens, rl.max_batch)
    return by_cell(done, setting, c.counting)[cell.key]


# ------------------------------------------------------------------------------------ figures


def _rewards(cold: ByCell, expert: ByCell, merged: ByCell) -> dict[tuple[str, str], Any]:
    return {k: (cold[k].rewards, expert[k].rewards, merged[k].rewards) for k in cold}


def kept(cold: ByCell, expert: ByCell, merged: ByCell) -> dict[str, Any]:
    """retention: mean over cells with its interval; None where an expert gained nothing. worst: over cells."""
    cells, share = retention(_rewards(cold, expert, merged))
    by = {":".join(k): r.share.value if r.share is not None else None for k, r in cells.items()}
    known = [v for v in by.values() if v is not None]
    return {
        "retention": None if share is None else share.value, "low": None if share is None else share.low,
        "high": None if share is None else share.high, "worst": min(known, default=None), "cells": by,
        "reward": mean(r.merged for r in cells.values()),
    }  # fmt: skip


def _gain(retained: Any) -> dict[str, float]:
    g = retained.gain
    return {"gain": g.mean, "low": g.low, "high": g.high}


def over_best(c: Context, expert: ByCell, student: ByCell) -> dict[str, float]:
    """By level."""
    cells = cells_of(c.recipe)
    out = {}
    for level in c.recipe.tasks.efforts:
        at = [x for x in cells if x.effort == level]
        singles = [mean(_reward(abroad(c, one, cell, expert)) for cell in at) for one in at]
        out[level] = mean(_reward(student[x.key]) for x in at) - max(singles)
    return out


def abroad(c: Context, one: Cell, cell: Cell, expert: ByCell) -> Played:
    """The expert of `one` on another cell of its level; played now if that is not there."""
    if one == cell:
        return expert[cell.key]
    file = c.root / "rivals" / "experts" / f"{one.name}-on-{cell.name}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(attempts(hf.load(model_of(c.root, one)), c, cell).to_json()))
    return Played(**json.loads(file.read_text()))


def _reward(played: Played) -> float:
    return mean(played.rewards.values())


def worst(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over seeds."""
    if not all("ways" in f for f in found):
        return {"minutes": max(f["minutes"] for f in found)}
    mine = [f["ways"][STUDENT] for f in found]
    return {
        "retention": min((m["retention"] for m in mine if m["retention"] is not None), default=None),
        "worst_cell": min((m["worst"] for m in mine if m["worst"] is not None), default=None),
        "gain_low": min(g["low"] for f in found for g in f["gains"].values()),
        "over_best": min(v for f in found for v in f["over_best"].values()),
        "separated": int(all(row["separated"] for f in found for row in f["levels"])),
        "low_share": max(
            (row["share"] for f in found for row in f["levels"] if row["share"] is not None), default=None
        ),
        "ordered": int(all(row["ordered"] is not False for f in found for row in f["levels"])),
        "minutes": max(f["minutes"] for f in found),
    }


def print_table(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table("way", *(f"seed {i}" for i in range(len(found))), title="retention [95%], worst cell, tokens")
    for name in found[0].get("ways", {}):
        table.add_row(name, *(_text(f["ways"][name]) for f in found))
    Console(stderr=True, width=150, highlight=False).print(table)


def _text(way: Mapping[str, Any]) -> str:
    share, low, high, least = (
        "-" if way[k] is None else f"{way[k]:.0%}" for k in ("retention", "low", "high", "worst")
    )
    return f"{share} [{low}, {high}], {least}, {way['tokens']:,}"
