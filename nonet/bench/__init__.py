"""Claims, measured: `nonet bench NAME`. One file per claim; each is found by its name and imported only to be run.

A bench is a module in this folder with `measure() -> dict`: figures by name, ratios first, baseline and treatment
interleaved in one run. Its docstring's first line is what `nonet bench list` prints. This file adds what every figure
needs beside it (machine, versions, cpu pressure) and refuses to call a figure of a busy machine a headline.

Imports only the standard library, so that peers can import this room from venvs of their own.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nonet.bench.machine import QUIET_BELOW, cpu_pressure, is_quiet, machine, versions
from nonet.types import UserError


def run_bench(name: str, as_json: bool, only: Sequence[str] = ()) -> None:
    """Run one bench and print what it found: one line of JSON as the last line, or a table. "list" names the
    benches. only: parts of a bench whose `measure` takes them.
    """
    known = benches()
    if name == "list":
        print(json.dumps(known) if as_json else "\n".join(f"{n:12} {about}" for n, about in known.items()))
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise UserError(f"bench {name!r}: no such bench; did you mean {near}? `nonet bench list` names them")
    result = measured(name, only)
    print(json.dumps(result) if as_json else table(name, result))


def benches() -> dict[str, str]:
    """Name -> one line about it, read from the files without importing them."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def measured(name: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of a bench, with the machine, the versions and the cpu pressure they were taken under."""
    before = cpu_pressure()
    measure = importlib.import_module(f"nonet.bench.{name}").measure
    if only and "only" not in inspect.signature(measure).parameters:
        raise UserError(f"bench {name}: only {','.join(only)!r}: this bench has no parts; leave it out")
    result = measure(only=only) if only else measure()
    after = cpu_pressure()
    peers = result.pop("versions", {})
    return {
        **result,
        "quiet": is_quiet(before, after),
        "cpu_pressure": {"before": before, "after": after},
        "machine": machine(),
        "versions": {**versions(), **peers},
    }


def table(name: str, result: Mapping[str, Any]) -> str:
    """What a person reads: the verdict on the machine, then one figure a line in the bench's order."""
    pressure = ", ".join(f"{when} {_shown(value)}%" for when, value in result["cpu_pressure"].items())
    verdict = "quiet machine" if result["quiet"] else f"NOT a headline: needs cpu pressure below {QUIET_BELOW:g}%"
    flat = [(key, value) for key, value in result.items() if key not in ("quiet", "cpu_pressure")]
    lines = [f"{name}: {verdict} (cpu pressure {pressure})"]
    for key, value in flat:
        shown = ", ".join(f"{k} {_shown(v)}" for k, v in value.items()) if isinstance(value, Mapping) else _shown(value)
        lines.append(f"  {key:16} {shown}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{k} {_shown(v)}" for k, v in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
