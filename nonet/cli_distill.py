"""`nonet distill`: several experts into one model, by what they think of its own words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nonet.types import UserError


def distill(
    student: Annotated[Path, typer.Option(help="Model directory that learns, e.g. what the experts started from.")],
    tasks: Annotated[str, typer.Option(help="What it plays: general, agents, coding, gym:NAME, FILE.jsonl, ...")],
    out: Annotated[Path, typer.Option(help="Run directory; start again with the same one to continue.")],
    expert: Annotated[
        list[str] | None,
        typer.Option(
            help="domain:effort=WHERE, WHERE a model directory, a PEFT directory or http://host:port/v1. Repeatable."
        ),
    ] = None,
    reward: Annotated[str, typer.Option(help="Judge held-out tasks with this, not the tasks' own rewards.")] = "",
    harness: Annotated[str, typer.Option(help="Preset name or TOML file.")] = "plain",
    eval_prompts: Annotated[int, typer.Option(help="Held-out prompts measured before and after.")] = 200,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one value: room.key=value. Repeatable.")
    ] = None,
) -> None:
    """Distil experts into one student, on the student's own attempts: no expert generates anything.

    \b
    nonet distill --student models/base --tasks general,agents \\
        --expert general:max=runs/general/models/rl \\
        --expert agents:max=runs/agents/models/rl --out runs/one
    nonet distill ... --expert coding:low=http://127.0.0.1:8000/v1
    nonet distill ... --set distill.discount=1 --set rl.steps=200
    nonet distill ... --set distill.loss=kl_full

    The student plays the tasks, each at an effort that has an expert. Every token it wrote is then worth
    log pi_expert - log pi_student, clipped to +-distill.r_max, where the expert of the task's domain and effort reads a
    prompt without the effort message. The loop is that of `nonet rl`: partial rollouts, park store, ratio window.

    First a table of the experts is printed, and what would teach nonsense is refused: another vocabulary, a task
    without an expert, an expert without a task. The result is OUT/models/distill, the report OUT/report.html.
    Every knob of both tables, distill and rl, is reachable by --set.
    """
    from nonet.pipeline.distilling import distill_recipe, run_distill

    if not student.is_dir():
        raise UserError(f"--student {student}: no such directory; name a model directory, e.g. from nonet import")
    run_distill(distill_recipe(student, expert or (), tasks, reward, harness, eval_prompts, set_ or ()), out)
