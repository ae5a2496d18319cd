"""The main job, `nonet run RECIPE`: which stages a recipe has, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nonet.pipeline.experts import eval_experts, eval_student, experts, student
from nonet.pipeline.recipe import Recipe
from nonet.pipeline.runner import print_table, run_stages
from nonet.pipeline.stages import BEGIN, END, ONE_RUN, Stage
from nonet.types import UserError

NINE: tuple[Stage, ...] = (
    ("experts", experts), ("eval-expert", eval_experts), ("distill", student), ("eval-distill", eval_student)
)  # fmt: skip


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    return (*BEGIN, *(NINE if recipe.experts is not None else ONE_RUN), *END)


def run_recipe(recipe: Recipe, out: Path, only: Sequence[str] = ()) -> None:
    """Every stage (of `only`, if given) whose marker is missing; ends with the held-out table."""
    if recipe.pretrain is not None:
        raise UserError("[pretrain]: nonet run does not pretrain; use nonet pretrain, then start.model = its result")
    run = run_stages(recipe, out, stages_of(recipe), only)
    if (out / "report.html").exists():
        print_table(run)
