"""`make evidence NAME=house`: run what an issue must show and print it as a table.

Each line is a function that returns figures and whether they suffice. Results are kept in .evidence/NAME.json, so an
interrupted collection continues; long lines are runs that resume by themselves. `--fresh` forgets earlier results.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nonet.run import write_atomic
from nonet.types import UserError

FOLDER = Path(".evidence")


@dataclass(frozen=True)
class Line:
    """One line of evidence: collect() -> (figures, ok)."""

    name: str
    asks: str
    collect: Callable[[], tuple[dict[str, Any], bool]]


def main(arguments: list[str]) -> int:
    names = [a for a in arguments if not a.startswith("--")]
    name = names[0] if names else "house"
    try:
        lines: tuple[Line, ...] = importlib.import_module(f"nonet.bench.evidence_{name}").LINES
    except ModuleNotFoundError as e:
        raise UserError(f"evidence {name!r}: no such collection") from e
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}.json"
    results = {} if "--fresh" in arguments or not file.exists() else json.loads(file.read_text())
    console = Console(width=140)
    for line in lines:
        if line.name in results:
            continue
        console.print(f"[bold]{line.name}[/bold] {escape(line.asks)}")
        began = time.time()
        figures, ok = line.collect()
        results[line.name] = {"figures": figures, "ok": ok, "seconds": round(time.time() - began, 1)}
        write_atomic(file, json.dumps(results, indent=1))
    console.print(_table(name, lines, results))
    return 0 if all(results[line.name]["ok"] for line in lines) else 1


# ------------------------------------------------------------------------------ kinds of lines


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def tests(*arguments: str) -> tuple[dict[str, Any], bool]:
    """pytest with these arguments, every random program: its closing line, and whether all passed."""
    done = run(sys.executable, "-m", "pytest", *arguments, NONET_PROGRAMS="all")
    closing = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    return {"pytest " + " ".join(arguments): closing}, done.returncode == 0


def bench(
    name: str, keys: tuple[str, ...], suffices: Callable[[dict[str, Any]], bool], *options: str
) -> Callable[[], tuple[dict[str, Any], bool]]:
    """`nonet bench NAME --json`: some of its figures, and whether they suffice."""

    def collect() -> tuple[dict[str, Any], bool]:
        done = run(sys.executable, "-m", "nonet.cli", "bench", name, "--json", *options)
        if done.returncode:
            return {"error": (done.stderr.strip() or "no message").splitlines()[-1]}, False
        figures = json.loads(done.stdout.splitlines()[-1])
        return {k: figures[k] for k in (*keys, "quiet") if k in figures}, suffices(figures)

    return collect


def _table(name: str, lines: tuple[Line, ...], results: dict[str, Any]) -> Table:
    table = Table("line", "asks", "figures", "ok", "seconds", title=f"evidence: {name}", show_lines=True)
    for line in lines:
        r = results[line.name]
        figures = "\n".join(f"{k} = {v}" for k, v in r["figures"].items())
        table.add_row(line.name, line.asks, figures, "yes" if r["ok"] else "NO", str(r["seconds"]))
    return table


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        print(f"evidence: {e}", file=sys.stderr)
        sys.exit(2)
