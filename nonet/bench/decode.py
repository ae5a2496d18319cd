"""Decode steps beside transformers, llama.cpp and vLLM: a K3 of 18M, Kimi-Linear of 22M, SmolLM2-135M, MLA at 64k.

Ratios are theirs over ours, so above 1 we are faster: medians over interleaved turns of CPU seconds a step, one thread
on either side. "two_threads" holds the same ratios of wall seconds with both cores, which mean something on a quiet
machine only.

    k3_b1_vs_hf, k3_b64_vs_hf   Kimi-Linear, the nearest that transformers has, on both sides: same float32 weights
    k3_b1_vs_llamacpp           K3 itself, float32 in both
    smollm2_b*_vs_vllm          weights and what they multiply in bfloat16 on both sides; caches float32 here. With
                                float32 activations here: smollm2_b*_a32_vs_vllm
    smollm2_b1_vs_llamacpp      the packaged GGUF (Q4_1, Q8_0 embedding) there, its weights as int8 here; the same with
                                MXFP4 here is smollm2_b1_mxfp4_vs_llamacpp
    mla_8k_vs_hf, mla_64k_vs_hf one MLA layer; transformers expands all latents at every step

quality: SmolLM2 with weights in fewer bits against float32 on this repository's README. A peer that is not installed is
named under "missing".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import nonet
from nonet.bench.decode_models import Case, Work
from nonet.bench.turns import Turn, Worker, interleave
from nonet.progress import progress
from nonet.types import UserError

ROOT = Path(nonet.__path__[0]).parent
WARMUP, PAIRS, AT_LEAST, LIMIT_S = 1, 5, 3, 90.0
SMOLLM2 = ROOT / "models" / "smollm2"
K3_B1, K3_B64 = Case("k3_b1", 1), Case("k3_b64", 64, short=2, long=8)
MLA_8K, MLA_64K = Case("mla_8k", 1, past=8192, short=6), Case("mla_64k", 1, past=65536, short=3)
SMOLLM2_B1, SMOLLM2_B16 = Case("smollm2_b1", 1, short=4, long=20), Case("smollm2_b16", 16, short=2, long=10)


@dataclass(frozen=True)
class Pair:
    """Ours and a peer at the same work. models: which of decode_files.py's each reads; suffix: of the figures' keys.
    same: largest difference of log-probs, ours in float32, that the peer's formats account for.
    """

    peer: str
    cases: tuple[Case, ...]
    ours: str
    theirs: str
    weights: str = "float32"
    suffix: str = ""
    same: float = 1e-3


PAIRS_OF_WORK = {
    "hf": Pair("hf", (K3_B1, K3_B64), "kimi", "kimi"),
    "mla": Pair("hf", (MLA_8K, MLA_64K), "mla", "mla"),
    "llamacpp": Pair("llamacpp", (K3_B1,), "k3", "k3.gguf", same=2e-3),
    "vllm": Pair("vllm", (SMOLLM2_B1, SMOLLM2_B16), "smollm2", "smollm2", "w16a16", same=0.25),
    "vllm_a32": Pair("vllm", (SMOLLM2_B1, SMOLLM2_B16), "smollm2", "smollm2", "bf16", "_a32", same=0.25),
    "llamacpp_smollm2": Pair("llamacpp", (SMOLLM2_B1,), "smollm2", "smollm2.gguf", "int8", same=0.6),
    "llamacpp_smollm2_mxfp4": Pair("llamacpp", (SMOLLM2_B1,), "smollm2", "smollm2.gguf", "mxfp4", "_mxfp4", same=0.6),
}


def measure(only: Sequence[str] = (), pairs: int = PAIRS) -> dict[str, Any]:
    """only: names of PAIRS_OF_WORK, or "quality"; all if empty."""
    from nonet.bench.decode_files import Files
    from nonet.bench.decode_quality import quality

    unknown = set(only) - {*PAIRS_OF_WORK, "quality"}
    if unknown:
        raise UserError(f"bench decode: only {min(unknown)!r}: not one of {', '.join(PAIRS_OF_WORK)}, quality")
    out: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with TemporaryDirectory() as name:
        files = Files(Path(name), SMOLLM2)
        for part in [p for p in (*PAIRS_OF_WORK, "quality") if not only or p in only]:
            try:
                found = {"quality": quality(files.path("smollm2"))} if part == "quality" else taken(part, files, pairs)
            except UserError as e:
                missing[part] = str(e)
            else:
                _merge(out, found)
    if not out:
        raise UserError("; ".join(missing.values()))
    return {**out, "missing": missing} if missing else out


def _merge(out: dict[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        out[key] = {**out.get(key, {}), **value} if isinstance(value, Mapping) else value


def taken(part: str, files: Any, pairs: int) -> dict[str, Any]:
    """The figures of one pair: one thread, then two."""
    pair = PAIRS_OF_WORK[part]
    python, script = peer(pair.peer)
    out: dict[str, Any] = {}
    for threads in (1, 2):
        work = Work(str(files.path(pair.ours)), pair.cases, pair.weights, threads)
        mine = work.write(files.folder / f"{part}-ours.json")
        other = replace(work, model=str(files.path(pair.theirs))).write(files.folder / f"{part}-theirs.json")
        env = environment(threads)
        with ExitStack() as stack:
            us = stack.enter_context(Worker("nonet", [sys.executable, "-m", "nonet.bench.decode_worker", mine], env))
            them = stack.enter_context(Worker(pair.peer, [python, *script, other], env))
            check(pair, us.facts["log_probs"], them.facts["log_probs"])
            turns = []
            with progress(f"bench decode: {part}, {threads} thread{'s' * (threads > 1)}", pairs) as bar:
                for turn in interleave(us, them, WARMUP, pairs, min(AT_LEAST, pairs), LIMIT_S):
                    turns.append(turn)
                    bar(len(turns), f"{turn[0].seconds:.1f} s")
        _merge(out, figures(pair, turns, threads))
    return out


def figures(pair: Pair, turns: Sequence[tuple[Turn, Turn]], threads: int) -> dict[str, Any]:
    """Ratios, and both sides' milliseconds a step."""
    clock = "cpu" if threads == 1 else "wall"
    ratios: dict[str, float] = {}
    ms: dict[str, dict[str, float]] = {}
    for case in pair.cases:
        name, key = f"{case.key}{pair.suffix}_vs_{pair.peer}", f"{clock}_{case.key}"
        ratios[name] = median(b.figures[key] / a.figures[key] for a, b in turns)
        sides = {"ours": [a for a, _ in turns], "theirs": [b for _, b in turns]}
        ms[name] = {side: 1e3 * median(t.figures[key] for t in ts) for side, ts in sides.items()}
    if threads == 1:
        return {**ratios, "cpu_ms": ms}
    return {"two_threads": ratios, "two_threads_ms": ms}


def check(pair: Pair, ours: Sequence[float], theirs: Mapping[str, float]) -> None:
    """Both sides must hold the same model, or the comparison is void."""
    worst = max(abs(ours[int(i)] - x) for i, x in theirs.items())
    if not worst < pair.same:
        raise AssertionError(f"{pair.peer} on {pair.theirs}: log-probs differ by {worst:.2g}, needs below {pair.same}")


def peer(name: str) -> tuple[Path, list[str | Path]]:
    """A peer's interpreter and what it runs."""
    if name == "hf":
        from importlib.util import find_spec

        if find_spec("transformers") is None:
            raise UserError("bench decode: needs transformers; run: pip install transformers")
        return Path(sys.executable), ["-m", "nonet.bench.decode_hf"]
    python = ROOT / ".peers" / name / "bin" / "python"
    if not python.exists():
        raise UserError(f"bench decode: needs the {name} venv; run `make peers`")
    return python, [ROOT / "peers" / f"{name}_decode.py"]


def environment(threads: int) -> dict[str, str]:
    """The same for all. PYTHONPATH lets peers read this room's standard-library files; the rest is for vLLM."""
    vllm = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    vllm |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **vllm}
