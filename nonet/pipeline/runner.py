"""Run a recipe: stages in order, each skipped when its marker exists, each resumable inside."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nonet.config import build
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import Recipe
from nonet.pipeline.stages import Stage
from nonet.run import Run, write_atomic

MEASURED = ("eval", "gain", "cell", "retention", "separation", "draft_measured", "served", "sample")


def run_stages(
    recipe: Recipe,
    out: Path,
    stages: Sequence[Stage],
    only: Sequence[str] = (),
    part_of: Path | None = None,
) -> Run:
    """The stages in order, each skipped when its marker exists. Returns the run directory they wrote to.
    part_of: the directory of the whole job, where `out` is one part of it.
    """
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    run = Run(out, recipe.model_dump(mode="json"), lambda old: build(Recipe, old).model_dump(mode="json"))
    context = Context(recipe, run, part_of)
    console = Console(stderr=True)
    for name, stage in stages:
        if only and name not in only:
            continue
        marker = out / "stages" / f"{name}.json"
        if marker.exists():
            console.print(f"[dim]{name}: done before, skipped[/dim]")
            continue
        console.print(f"[bold]{name}[/bold]")
        start_over(run, name)
        run.event("stage", name=name, status="start")
        began = time.time()
        stage(context)
        seconds = time.time() - began
        run.event("stage", name=name, status="done", seconds=seconds)
        marker.parent.mkdir(exist_ok=True)
        write_atomic(marker, json.dumps({"seconds": seconds}))
        console.print(f"[dim]{name}: {seconds:.1f} s[/dim]")
    return run


def start_over(run: Run, stage: str) -> None:
    """Drop what a killed attempt at this stage had measured, for the new one measures it again. What was recorded while
    training stays: it goes on from a checkpoint and drops what came after that.
    """
    run.rewind(lambda e: e["kind"] not in MEASURED or e.get("stage") != stage)


def print_table(run: Run) -> None:
    """Held-out reward before and after training per domain and mode, then the draft's acceptance and what clients
    get, from the run's events.
    """
    evals = {(e["domain"], e["mode"], e["stage"]): e for e in run.events("eval")}
    table = Table(title="held-out reward, 95% intervals")
    for column in ("domain", "mode", "prompts", "before", "after", "stage", "gain"):
        table.add_column(column)
    for g in run.events("gain"):
        stage = g.get("stage", "eval-rl")  # older runs knew no other
        before, after = (evals[g["domain"], g["mode"], s] for s in ("eval-cold", stage))
        spread = [f"{e['reward']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in (before, after)]
        gain = f"{g['gain']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}]"
        table.add_row(g["domain"], g["mode"], str(g["n"]), *spread, stage.removeprefix("eval-"), gain)
    console = Console(width=120)
    for shown in (table, draft_table(run), served_table(run)):
        if shown.row_count:
            console.print(shown)
    console.print(f"report: {run.path / 'report.html'}", soft_wrap=True)


def draft_table(run: Run) -> Table:
    """Acceptance length of the draft as it started (the MTP layer, or a copied one) and tuned; no rows where none was
    made.
    """
    table = Table(title="acceptance length (bonus token included), 95% intervals")
    for column in ("domain", "mode", "tasks", "drafted", "untouched", "tuned", "gain"):
        table.add_column(column)
    for e in run.events("draft_measured"):
        lengths = [_length(e[name]) for name in ("untouched", "tuned")]
        g = e["factor"]
        gain = f"{g['ratio']:.2f}x [{g['low']:.2f}, {g['high']:.2f}]" if g else "-"
        table.add_row(e["domain"], e["mode"], str(e["tuned"]["requests"]), str(e["tokens"]), *lengths, gain)
    return table


def served_table(run: Run) -> Table:
    """What clients get over HTTP, without and with the draft; no rows where nothing was served."""
    table = Table(title="served: held-out tasks over HTTP, 95% intervals")
    for column in ("domain", "mode", "tasks", "reward", "with draft", "drafted tokens that stood", "speed-up"):
        table.add_column(column)
    for e in run.events("served"):
        alone, drafted = e["alone"], e.get("drafted")
        rewards = [f"{f['reward']:.3f} [{f['low']:.3f}, {f['high']:.3f}]" if f else "-" for f in (alone, drafted)]
        share = f"{drafted['stood'] / max(1, drafted['asked']):.0%}" if drafted else "-"
        speedup = f"{e['speedup']:.2f}x" if drafted else "-"
        table.add_row(e["domain"], e["mode"], str(alone["n"]), *rewards, share, speedup)
    return table


def _length(f: Mapping[str, Any]) -> str:
    return f"{f['length']:.2f} [{f['low']:.2f}, {f['high']:.2f}]" if f["requests"] else "all looping"
