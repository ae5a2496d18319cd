"""`nonet runs`: what run directories hold, while they run or after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="runs",
    help="Look into run directories: what is parked, word by word.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_(folder: Annotated[Path, typer.Argument(help="Where the run directories are.")] = Path("runs")) -> None:
    """List runs that have a park store: step, groups trained and held, trajectories by status."""
    from nonet.pipeline.runs import print_runs

    print_runs(folder)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    trajectory: Annotated[str, typer.Option(help="Show this one as text, e.g. group=3/sample=0.")] = "",
    tokenizer: Annotated[Path | None, typer.Option(help="Decode with this; default: the run's own model.")] = None,
) -> None:
    """Show the trajectories of a run's park store: status, age, versions, tokens, sandbox, reason.

    Released ones can be shown by name until the store is compacted.
    """
    from nonet.pipeline.runs import print_run, print_trajectory

    if trajectory:
        print_trajectory(run, trajectory, tokenizer)
    else:
        print_run(run)
