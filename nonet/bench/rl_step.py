"""Seconds and memory of one RL step beside TRL's GRPOTrainer: same weights, prompts, budget, reward and threads.

speedup is the median over pairs of (TRL seconds / our seconds), each pair two steps that ran side by side;
memory_ratio is our peak resident size over TRL's. 32 completions of exactly 128 tokens, one policy update, fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import nonet
from nonet.bench.turns import Turn, Worker, interleave
from nonet.bench.workload import Workload
from nonet.progress import progress
from nonet.types import UserError

WARMUP, PAIRS, AT_LEAST, LIMIT_S = 2, 15, 5, 75.0
ROOT = Path(nonet.__path__[0]).parent


def measure(work: Workload = Workload(), pairs: int = PAIRS) -> dict[str, Any]:
    python = peer_python("trl")
    with TemporaryDirectory() as name:
        folder = Path(name)
        work.write(folder)
        with ours(folder, work) as us, trl(python, folder, work) as them:
            taken: list[tuple[Turn, Turn]] = []
            with progress("bench rl_step: pairs of steps", pairs) as bar:
                for pair in interleave(us, them, WARMUP, pairs, min(AT_LEAST, pairs), LIMIT_S):
                    taken.append(pair)
                    bar(len(taken), f"{pair[1].seconds / pair[0].seconds:.2f}x")
            memory = us.stop()["peak_bytes"], them.stop()["peak_bytes"]
            return {**figures(taken, *memory), **facts(us, them, work), "versions": {"trl": them.facts["versions"]}}


def peer_python(name: str) -> Path:
    """The interpreter of a peer's venv."""
    python = ROOT / ".peers" / name / "bin" / "python"
    if not python.exists():
        raise UserError(f"bench rl_step: needs the {name.upper()} venv; run `make peers`")
    return python


def ours(folder: Path, work: Workload) -> Worker:
    return Worker("nonet", [sys.executable, "-m", "nonet.bench.rl_step_worker", folder], environment(work))


def trl(python: Path, folder: Path, work: Workload) -> Worker:
    return Worker("TRL", [python, ROOT / "peers" / "trl_step.py", folder], environment(work))


def environment(work: Workload) -> dict[str, str]:
    """The same for both sides. PYTHONPATH lets the peer read this room's standard-library files."""
    return {"OMP_NUM_THREADS": str(work.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def figures(taken: list[tuple[Turn, Turn]], our_bytes: float, trl_bytes: float) -> dict[str, Any]:
    """Ratios first, then what they come from. blocked_cpu: share of a core that the waiting side used."""
    ratios = sorted(theirs.seconds / ours.seconds for ours, theirs in taken)
    both = {"ours": [a for a, _ in taken], "trl": [b for _, b in taken]}
    out: dict[str, Any] = {
        "speedup": median(ratios),
        "memory_ratio": our_bytes / trl_bytes,
        "speedup_range": [ratios[0], ratios[-1]],
        "pairs": len(taken),
        "seconds": {side: median(t.seconds for t in turns) for side, turns in both.items()},
    }
    for part in ("generation_s", "update_s"):
        out[part] = {side: median(t.figures[part] for t in turns) for side, turns in both.items()}
    out["peak_mb"] = {"ours": our_bytes / 1e6, "trl": trl_bytes / 1e6}
    turns = [t for pair in taken for t in pair]
    out["blocked_cpu"] = sum(t.other_cpu_s for t in turns) / sum(t.seconds for t in turns)
    return out


def facts(us: Worker, them: Worker, work: Workload) -> dict[str, Any]:
    for key in ("threads", "parameters"):
        if us.facts[key] != them.facts[key]:
            raise AssertionError(f"{key}: ours {us.facts[key]}, TRL {them.facts[key]}; the two sides must be alike")
    return {
        "completions": work.completions,
        "new_tokens": work.new_tokens,
        "parameters": us.facts["parameters"],
        "threads": us.facts["threads"],
    }
