"""Cells: a domain at an effort level. What a recipe measures, and what it trains an expert for.

evals/NAME-CELL-MODE.json    reward and tokens (T, rl/budgets.py) by held-out task
events "eval"                means with intervals, `domain` being the cell
events "gain"                after - before over the same tasks
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nonet.model import hf
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import Recipe
from nonet.rl.evaluate import eval_event, evaluate, gain
from nonet.rl.record import trajectory_record
from nonet.rl.retention import Played, by_cell
from nonet.rl.setting import Setting
from nonet.run import write_atomic

MODES = {"sampled": 1.0, "greedy": 0.0}
SHOWN = 6  # attempts of each measurement that are kept for reading


@dataclass(frozen=True)
class Cell:
    """name: the domain, and the effort behind a dash where the recipe has several."""

    domain: str
    effort: str
    name: str

    @property
    def key(self) -> tuple[str, str]:
        return self.domain, self.effort

    def setting(self, c: Context) -> Setting:
        return c.setting(self.domain, efforts=(self.effort,))


def cells_of(recipe: Recipe) -> list[Cell]:
    """Efforts in the recipe's order, all domains of the first one first."""
    t = recipe.tasks
    several = len(t.efforts) > 1
    return [Cell(d, e, f"{d}-{e}" if several else d) for e in t.efforts for d in t.sources]


def measure(c: Context, name: str, model: Path, cells: Sequence[Cell]) -> None:
    """Held-out reward of a model directory on these cells, both modes: files and events as above."""
    policy, folder = hf.load(model), c.run.path / "evals"
    folder.mkdir(exist_ok=True)
    for cell in cells:
        setting = cell.setting(c)
        for mode, temperature in MODES.items():
            rl = c.recipe.rl
            done = evaluate(policy, setting, range(c.recipe.eval.prompts), temperature, rl.max_tokens, rl.max_batch)
            played = by_cell(done, setting, c.counting)[cell.key]
            write_atomic(eval_file(c.run.path, name, cell, mode), json.dumps(played.to_json()))
            facts = {"domain": cell.name, "source": c.recipe.tasks.sources[cell.domain], "mode": mode}
            c.run.event("eval", stage=f"eval-{name}", **facts, **eval_event(done))
            records = [trajectory_record(t, setting.task("heldout", t.group), c.tokenizer, 0) for t in done[:SHOWN]]
            c.run.write_trajectories(f"eval-{name}-{cell.name}-{mode}", records)


def compare(c: Context, before: str, after: str, cells: Sequence[Cell]) -> None:
    """Events "gain" between two measurements."""
    for cell in cells:
        for mode in MODES:
            b, a = (read_played(c.run.path, name, cell, mode) for name in (before, after))
            e = gain(b.rewards, a.rewards)
            c.run.event(
                "gain", domain=cell.name, mode=mode, stage=f"eval-{after}", n=e.n, gain=e.mean, low=e.low, high=e.high
            )


def eval_file(run: Path, name: str, cell: Cell, mode: str) -> Path:
    return run / "evals" / f"{name}-{cell.name}-{mode}.json"


def read_played(run: Path, name: str, cell: Cell, mode: str) -> Played:
    return Played(**json.loads(eval_file(run, name, cell, mode).read_text()))
