"""Seconds and memory of one on-policy distillation step beside TRL's DistillationTrainer and GKDTrainer.

32 completions of exactly 128 tokens by a student of 0.92M parameters, judged by a teacher of 5.2M, one update, fp32,
the same weights, prompts, learning rate and threads. Ours rewards sampled tokens through the RL loop; TRL's two put
reverse KL over the vocabulary (259 tokens here) into the loss. Each pair is two steps that ran side by side. speedup:
median of (TRL seconds / ours) against the faster of the two; memory_ratio: our peak resident size over the smaller of
theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nonet.bench import rl_step
from nonet.bench.turns import Turn, Worker, interleave
from nonet.bench.workload import Workload
from nonet.progress import progress

WARMUP, PAIRS, AT_LEAST, LIMIT_S = 2, 12, 5, 60.0
WORK = Workload(prompts=16, samples=2)
PEERS = ("distillation", "gkd")


def measure(work: Workload = WORK, pairs: int = PAIRS) -> dict[str, Any]:
    python = rl_step.peer_python("trl")
    found = {peer: against(peer, python, work, pairs) for peer in PEERS}
    return {
        "speedup": min(f["speedup"] for f in found.values()),
        "memory_ratio": max(f["memory_ratio"] for f in found.values()),
        **found,
        "versions": {"trl": found[PEERS[0]].pop("trl"), "gkd": found[PEERS[1]].pop("trl")},
    }


def against(peer: str, python: Path, work: Workload, pairs: int) -> dict[str, Any]:
    """The figures of rl_step against one of TRL's trainers."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        work.write(folder)
        with ours(folder, work) as us, trl(peer, python, folder, work) as them:
            taken: list[tuple[Turn, Turn]] = []
            with progress(f"bench opd_step: pairs of steps, {peer}", pairs) as bar:
                for pair in interleave(us, them, WARMUP, pairs, min(AT_LEAST, pairs), LIMIT_S):
                    taken.append(pair)
                    bar(len(taken), f"{pair[1].seconds / pair[0].seconds:.2f}x")
            memory = us.stop()["peak_bytes"], them.stop()["peak_bytes"]
            facts = {**rl_step.facts(us, them, work), "teacher_parameters": us.facts["teacher_parameters"]}
            return {**rl_step.figures(taken, *memory), **facts, "trl": them.facts["versions"]}


def ours(folder: Path, work: Workload) -> Worker:
    return Worker("nonet", [sys.executable, "-m", "nonet.bench.opd_step_worker", folder], rl_step.environment(work))


def trl(peer: str, python: Path, folder: Path, work: Workload) -> Worker:
    return Worker("TRL", [python, rl_step.ROOT / "peers" / "trl_opd.py", folder, peer], rl_step.environment(work))
