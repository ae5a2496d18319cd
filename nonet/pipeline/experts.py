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
from nonet.pipeline.cells import MODES, Cell, cells_of, compare, eval_file, measure, read_played
from nonet.pipeline.context import Context
from nonet.pipeline.distilling import teach
from nonet.pipeline.lanes import Job, run_jobs
from nonet.pipeline.recipe import Recipe
from nonet.pipeline.runner import run_stages
from nonet.pipeline.stages import evaluate_after, measure_budgets, rl_loop
from nonet.rl.config import RLConfig
from nonet.rl.distill import DistillConfig
from nonet.rl.retention import Played, retention, separation
from nonet.run import Run
from nonet.types import UserError


def folder_of(out: Path, cell: Cell) -> Path:
    return out / "experts" / cell.name


def model_of(out: Path, cell: Cell) -> Path:
    return folder_of(out, cell) / "model"


def experts(c: Context) -> None:
    """All of them, some at a time; the first effort's before the others'."""
    assert c.recipe.experts is not None
    measure_budgets(c)
    found, out = cells_of(c.recipe), c.run.path
    first = [cell for cell in found if cell.effort == found[0].effort]
    for wave in (first, [cell for cell in found if cell not in first]):
        run_jobs([_job(out, cell) for cell in wave], c.recipe.experts.lanes)


def eval_experts(c: Context) -> None:
    """Their gains over the cold start, each on its own cell, as their own directories have it."""
    found, out = cells_of(c.recipe), c.run.path
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
    rl_loop(c, model, cell.setting(c), config).fit()
    c.export(model, model_of(c.root, cell))


def student(c: Context) -> None:
    """models/cold, taught by all of them; the level is named to a teacher as it was when that was trained."""
    teach(c, *teaching(c))


def teaching(c: Context) -> tuple[DistillConfig, RLConfig]:
    """How the student is taught: by the experts of this run."""
    assert c.recipe.experts is not None
    teachers = {f"{cell.domain}:{cell.effort}": str(model_of(c.root, cell)) for cell in cells_of(c.recipe)}
    config = c.recipe.distill.model_copy(update={"experts": teachers, "teacher_effort": True})
    return config, c.recipe.rl_with(c.recipe.experts.student, "experts.student")


def eval_student(c: Context) -> None:
    """Its gains over the cold start, what it kept of the experts' (`retention`), and whether its levels part."""
    evaluate_after(c, "distill")
    for mode in MODES:
        at = {"stage": "eval-distill", "mode": mode}
        cold, expert, merged = (_played(c, name, mode) for name in ("cold", "expert", "distill"))
        for model, cells in (("cold", cold), ("expert", expert), ("merged", merged)):
            for (domain, effort), played in cells.items():
                c.run.event("cell", model=model, domain=domain, effort=effort, **at, **played.figures())
            for row in separation(cells) if len(c.recipe.tasks.efforts) > 1 else ():
                c.run.event("separation", model=model, **at, **row)
        kept, mean = retention({key: (cold[key].rewards, expert[key].rewards, merged[key].rewards) for key in cold})
        for (domain, effort), retained in kept.items():
            c.run.event("retention", domain=domain, effort=effort, **at, **retained.figures())
        if mean is not None:
            share = {"retention": mean.value, "low": mean.low, "high": mean.high}
            c.run.event("retention", domain="all", effort="", **at, **share)


def _played(c: Context, name: str, mode: str) -> dict[tuple[str, str], Played]:
    return {cell.key: read_played(c.run.path, name, cell, mode) for cell in cells_of(c.recipe)}
