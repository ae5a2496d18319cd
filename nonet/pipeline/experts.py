"""The experts: one policy for each domain and effort, trained by RL in processes side by side; then one student of all.

Experts of the first effort start from the cold start, the others from their domain's first expert.

    OUT/experts/CELL/      a run directory: events, park store, checkpoints, evals; log.txt is what it printed
    OUT/experts/CELL/model
    OUT/models/distill     the student, which starts from the cold start too
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from pathlib import Path

from nonet.config import build
from nonet.model import hf
from nonet.pipeline.cells import MODES, Cell, cells_of, compare, eval_file, measure
from nonet.pipeline.context import Context
from nonet.pipeline.distilling import teach
from nonet.pipeline.lanes import Job, run_jobs
from nonet.pipeline.recipe import Recipe
from nonet.pipeline.runner import run_stages
from nonet.rl.loop import Loop
from nonet.run import Run
from nonet.types import UserError


def folder_of(out: Path, cell: Cell) -> Path:
    return out / "experts" / cell.name


def model_of(out: Path, cell: Cell) -> Path:
    return folder_of(out, cell) / "model"


def experts(c: Context) -> None:
    """All of them, some at a time; the first effort's before the others'. Ends with their gains over the cold start,
    each on its own cell.
    """
    assert c.recipe.experts is not None
    found, out = cells_of(c.recipe), c.run.path
    first = [cell for cell in found if cell.effort == found[0].effort]
    for wave in (first, [cell for cell in found if cell not in first]):
        run_jobs([_job(out, cell) for cell in wave], c.recipe.experts.lanes)
    for cell in found:
        for mode in MODES:
            shutil.copy(eval_file(folder_of(out, cell), "expert", cell, mode), eval_file(out, "expert", cell, mode))
        for e in Run(folder_of(out, cell)).events("eval"):
            c.run.event(**{k: v for k, v in e.items() if k != "t"})
    compare(c, "cold", "expert", found)


def _job(out: Path, cell: Cell) -> Job:
    command = (sys.executable, "-m", "nonet.cli", "expert", str(out), cell.name)
    return Job(cell.name, command, folder_of(out, cell) / "log.txt")


def train_one(out: Path, name: str) -> None:
    """One expert of the recipe that `out` is the run directory of. Continues where it stopped."""
    recipe = build(Recipe, json.loads((out / "resolved.json").read_text()))
    cell = next((x for x in cells_of(recipe) if x.name == name), None)
    if cell is None or recipe.experts is None:
        raise UserError(f"expert {name!r}: {out} has none of this name")

    def train(c: Context) -> None:
        _train(c, cell)

    def evaluate(c: Context) -> None:
        measure(c, "expert", model_of(c.root, cell), [cell])

    alone = recipe.model_copy(update={"run": recipe.run.model_copy(update={"threads": 1})})
    folder = folder_of(out, cell)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one whose parent was killed has a moment to live
        run_stages(alone, folder, (("expert", train), ("eval-expert", evaluate)), part_of=out)


def _train(c: Context, cell: Cell) -> None:
    assert c.recipe.experts is not None
    base = next(x for x in cells_of(c.recipe) if x.domain == cell.domain)  # of the first effort
    model = hf.load(c.models("cold") if cell == base else model_of(c.root, base))
    config = c.recipe.rl if cell == base else c.recipe.rl_with(c.recipe.experts.later, "experts.later")
    Loop(model, cell.setting(c), config, c.run, c.recipe.run.seed).fit()
    c.export(model, model_of(c.root, cell))


def student(c: Context) -> None:
    """models/cold, taught by all of them."""
    assert c.recipe.experts is not None
    teachers = {f"{cell.domain}:{cell.effort}": str(model_of(c.root, cell)) for cell in cells_of(c.recipe)}
    config = c.recipe.distill.model_copy(update={"experts": teachers})
    teach(c, config, c.recipe.rl_with(c.recipe.experts.student, "experts.student"))
