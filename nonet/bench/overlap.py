"""The draft's loss fused with the output head, beside its naive form and the speculators package: memory and time.

One pass forward and backward at T 512, D 576, V 151,936, with gradients for hidden states and head, on one thread; the
draft's vocabulary whole, and pruned to 8,192. Memory: peak resident size of a fresh process per form over one pass,
less what it held before and less the gradients it leaves. Time: CPU seconds, medians of ratios within a turn. Headline
keys are the native form over the naive one. speculators (eager) gets logits, which its users' heads make; pruned, it
never sees the target's other tokens, so it does less work there and its loss is not the acceptance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import nonet
from nonet.bench.turns import Worker, interleave
from nonet.progress import progress
from nonet.types import UserError

WARMUP, PAIRS, AT_LEAST, LIMIT_S = 0, {"whole": 5, "pruned": 7}, 3, 300.0  # whole and pruned: as in overlap_inputs
ROOT = Path(nonet.__path__[0]).parent
OURS, PEER = ("naive", "native", "torch"), "speculators"
ALIKE = 1e-4  # relative, of losses and sizes of gradients


def measure() -> dict[str, Any]:
    python = ROOT / ".peers" / PEER / "bin" / "python"
    if not python.exists():
        raise UserError("bench overlap: needs the speculators venv; run `make peers`")
    us = [sys.executable, "-m", "nonet.bench.overlap_worker"]
    them = [python, ROOT / "peers" / "speculators_overlap.py"]
    facts: dict[str, Any] = {}
    by_case = {case: _case(case, us, them, facts) for case in PAIRS}
    return {**by_case.pop("whole"), **by_case, **facts}


def _case(case: str, us: Sequence[str | Path], them: Sequence[str | Path], facts: dict[str, Any]) -> dict[str, Any]:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    memory = {form: _extra_bytes([*us, "memory", form, case], environment) for form in OURS}
    memory[PEER] = _extra_bytes([*them, "memory", PEER, case], environment)
    ours = Worker("nonet", [*us, case], environment)
    with ours, Worker(PEER, [*them, case], environment) as theirs:
        check(ours.facts["digests"] | (theirs.facts["digests"] if case == "whole" else {}))
        rows = []
        with progress(f"bench overlap: {case}", PAIRS[case]) as bar:
            for a, b in interleave(ours, theirs, WARMUP, PAIRS[case], AT_LEAST, LIMIT_S):
                rows.append({**a.figures, **b.figures})
                bar(len(rows), f"{a.seconds + b.seconds:.1f} s")
        facts.update(threads=ours.facts["threads"], level=ours.facts["level"], versions=theirs.facts["versions"])
    return figures(memory, rows)


def _extra_bytes(command: Sequence[str | Path], environment: Mapping[str, str]) -> float:
    """What a fresh process says that one pass took."""
    out = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if out.returncode:
        raise RuntimeError(f"{command[-2]} in a process of its own: {out.stderr.strip()[-2000:]}")
    return float(json.loads(out.stdout))


def check(digests: Mapping[str, Sequence[float]]) -> None:
    """All forms must have computed the same, or the comparison is void."""
    want = digests["naive"]
    for name, found in digests.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, want, strict=True))
        if not worst < ALIKE:
            raise AssertionError(f"{name}: differs from the naive form by {worst:.1e}, needs below {ALIKE:g}")


def figures(memory: Mapping[str, float], rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """memory: extra bytes by form; rows: CPU seconds by form, one row per turn."""

    def time_of(form: str) -> float:
        return median(row[form] / row["naive"] for row in rows)

    return {
        "extra_memory_of_naive": memory["native"] / memory["naive"],
        "time_of_naive": time_of("native"),
        "torch_of_naive": {"extra_memory": memory["torch"] / memory["naive"], "time": time_of("torch")},
        "speculators_of_naive": {"extra_memory": memory[PEER] / memory["naive"], "time": time_of(PEER)},
        "extra_mib": {form: round(x / 2**20, 1) for form, x in memory.items()},
        "cpu_s": {form: round(median(row[form] for row in rows), 3) for form in memory},
        "turns": len(rows),
    }
