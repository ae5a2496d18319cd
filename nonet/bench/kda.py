"""KDA kernels beside fla's and transformers' CPU code, this core's sgemm and torch: forward, backward, decode step.

Ratios of thread CPU seconds on one thread, medians over turns in which both sides ran; each is the smaller of those at
1024 and 4096 positions (H 4, d 128; decode: H 8, d 128). decode_vs_torch is the C step as the engine's decode loop
drives it, over tensors that stay; decode_call_vs_torch goes through `kda_step_` and its checks every time. Both sides
must have computed the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import nonet
from nonet.bench.turns import Turn, Worker, interleave
from nonet.progress import progress
from nonet.types import UserError

WARMUP, PAIRS, AT_LEAST, LIMIT_S = 1, 7, 5, 150.0
LENGTHS, HEADS, WIDTH, SQUARE = (1024, 4096), 4, 128, 2048  # as in kda_inputs and kda_worker, which need torch
CHUNK = 16
ROOT = Path(nonet.__path__[0]).parent
ALIKE = 1e-5  # relative to the largest number of a digest


def measure(pairs: int = PAIRS) -> dict[str, Any]:
    python = peer_python()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    us = Worker("nonet", [sys.executable, "-m", "nonet.bench.kda_worker"], environment)
    with us, Worker("fla", [python, ROOT / "peers" / "fla_kda.py"], environment) as them:
        check("transformers", us.facts["digests"], us.facts["transformers_digests"])
        check("fla", us.facts["digests"], them.facts["digests"])
        taken: list[tuple[Turn, Turn]] = []
        with progress("bench kda: turns", pairs) as bar:
            for pair in interleave(us, them, WARMUP, pairs, min(AT_LEAST, pairs), LIMIT_S):
                taken.append(pair)
                bar(len(taken), f"{pair[0].seconds:.1f} s")
        facts = {"level": us.facts["level"], "threads": us.facts["threads"], "turns": len(taken)}
        rows = [{**a.figures, **b.figures} for a, b in taken]
        return {**figures(rows), **facts, "versions": {"fla": them.facts["versions"], **peer_versions()}}


def peer_python() -> Path:
    python = ROOT / ".peers" / "fla" / "bin" / "python"
    if not python.exists():
        raise UserError("bench kda: needs the fla venv; run `make peers`")
    return python


def peer_versions() -> dict[str, str]:
    from importlib import metadata

    return {"transformers": metadata.version("transformers")}


def check(name: str, ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> None:
    """Both sides must have done the same work, or the comparison is void."""
    for T, mine in ours.items():
        worst = max(abs(a - b) for a, b in zip(mine, theirs[T], strict=True)) / max(map(abs, mine))
        if not worst < ALIKE:
            raise AssertionError(f"{name} at {T} positions: differs from ours by {worst:.1e}, needs below {ALIKE:g}")


def flops(T: int) -> float:
    """Of the forward at its own arithmetic: three products with the state, triangles of a chunk."""
    return 2.0 * T * HEADS * (3 * WIDTH * WIDTH + CHUNK * 2 * WIDTH)


def figures(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """rows: seconds by name, one row per turn."""

    def ratio(above: str, below: str) -> dict[int, float]:
        return {T: median(r[f"{above}_{T}"] / r[f"{below}_{T}"] for r in rows) for T in LENGTHS}

    peak = 2.0 * SQUARE**3
    share = {T: median(flops(T) / r[f"native_{T}"] / (peak / r[f"sgemm_{T}"]) for r in rows) for T in LENGTHS}
    by_length = {
        "fwd_vs_fla": ratio("fla", "native"),
        "fwd_vs_hf": ratio("transformers", "native"),
        "fwd_of_sgemm": share,
        "fwdbwd_vs_autograd": ratio("torch_both", "native_both"),
        "torch_fwd_vs_fla": ratio("fla", "torch"),
    }
    out: dict[str, Any] = {name: min(values.values()) for name, values in by_length.items()}
    for B in (1, 64):
        out[f"decode_vs_torch_b{B}"] = median(r[f"step_torch_{B}"] / r[f"step_native_{B}"] for r in rows)
        out[f"decode_call_vs_torch_b{B}"] = median(r[f"step_torch_{B}"] / r[f"step_called_{B}"] for r in rows)
    middle = {name: median(r[name] for r in rows) for name in rows[0]}
    out["by_length"] = {name: {str(T): round(x, 3) for T, x in values.items()} for name, values in by_length.items()}
    passes = ("native", "torch", "transformers", "fla", "native_both", "torch_both")
    out["tokens_per_cpu_s"] = {f"{name}_{T}": round(T / middle[f"{name}_{T}"]) for name in passes for T in LENGTHS}
    out["step_us"] = {name: round(1e6 * x, 1) for name, x in middle.items() if name.startswith("step_")}
    out["sgemm_gflops"] = peak / median(r[f"sgemm_{T}"] for r in rows for T in LENGTHS) / 1e9
    return out
