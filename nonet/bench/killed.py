"""Law 17 at length: kill -9 at 30 random instants over an RL run; all as if nothing had happened.

Instants are spread over the run and over the phases of an iteration: generation, parking, update, checkpoint; within a
phase they are uniform over what it took the last time. identical: 1 if the final weights are bit-equal to those of the
run that nobody killed, the same (prompt, sample) pairs were trained in the same iterations, each once, and every figure
of every iteration but its clocks is the same. --only short: six kills.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nonet.bench.killed_worker import PHASES, config, job
from nonet.bench.qat import RECIPE
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import OwnDraftTable, load_recipe
from nonet.pipeline.runner import run_stages
from nonet.pipeline.stages import BEGIN
from nonet.progress import progress
from nonet.rl import park
from nonet.run import Run
from nonet.types import UserError

KILLS, SHORT = 30, 6
STEPS_A_KILL = 3
PATIENCE_S = 180.0
SMALL = ("model.d_model=64", "model.layers=4", "model.d_ff=128", "cold.steps=60", "run.threads=1")


def measure(only: Sequence[str] = ()) -> dict[str, Any]:
    if list(only) not in ([], ["short"]):
        raise UserError(f"bench killed: only {','.join(only)!r}: there is only short")
    torch.set_num_threads(1)
    kills = SHORT if only else KILLS
    steps = STEPS_A_KILL * (kills + 1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = started(folder / "start")
        job(model, folder / "whole", steps)
        with progress("bench killed: kills", kills) as bar:
            phases = []
            for phase in killed(model, folder / "killed", steps, kills):
                phases.append(phase)
                bar(len(phases), phase)
        same = compared(folder / "killed", folder / "whole")
        return {
            "identical": int(all(same.values())), **same, "kills": len(phases), "phases": dict(Counter(phases)),
            "steps": steps, "groups_trained": len(trained(folder / "whole")), "samples": config(steps).samples,
        }  # fmt: skip


def started(out: Path) -> Path:
    """A small model that has seen a few worked answers, with its tokenizer."""
    recipe = load_recipe([RECIPE], SMALL, quick=True).model_copy(update={"draft": OwnDraftTable()})
    return Context(recipe, run_stages(recipe, out, BEGIN[:2])).models("cold")


def killed(model: Path, out: Path, steps: int, kills: int, seed: int = 20_260_801) -> Iterator[str]:
    """Play the run to its end, killing it at `kills` instants; yields the phase that each hit."""
    rng = random.Random(seed)
    with Server(model, out, steps) as server:
        for i in range(kills):
            phase = PHASES[i % len(PHASES)]
            server.start()
            took = server.reach(phase, steps * (i + 1) // (kills + 2))
            time.sleep(rng.uniform(0, took))
            server.kill()
            assert not (out / "final.pt").exists()
            yield phase
        server.start()
        server.end()


class Server:
    """The controller's end of killed_worker: starts the run, follows its phases, kills it."""

    def __init__(self, model: Path, out: Path, steps: int):
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self._took: dict[str, float] = dict.fromkeys(PHASES, 0.02)  # seconds a phase took the last time
        command = [sys.executable, "-m", "nonet.bench.killed_worker", str(model), str(out), str(steps)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._pid = int(self._hear("pid")[0])

    def reach(self, phase: str, step: int) -> float:
        """Until the run enters a phase at a step or later. Returns seconds that the phase took the last time."""
        entered, now = time.monotonic(), ""
        while True:
            name, at = self._hear("at")
            if now:
                self._took[now] = time.monotonic() - entered
            entered, now = time.monotonic(), name
            if name == phase and int(at) >= step:
                return self._took[phase]

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        status = int(self._hear("exit")[0])
        if status != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with status {status} before it was killed{self._error()}")

    def end(self) -> None:
        status = int(self._hear("exit")[0])
        if status:
            raise RuntimeError(f"the run ended with status {status}{self._error()}")

    def _hear(self, word: str) -> list[str]:
        """The rest of the next line that begins with a word."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(PATIENCE_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                first, *rest = line.split()
                if first == word:
                    return rest
                if first == "exit":
                    raise RuntimeError(f"the run ended with status {rest[0]} while {word!r} was awaited{self._error()}")
        finally:
            watchdog.cancel()
        raise RuntimeError(f"the worker was silent for {PATIENCE_S:g} s{self._error()}")

    def _error(self) -> str:
        file = self.out / "error.txt"
        return f": {file.read_text()}" if file.exists() else ""


# --------------------------------------------------------------------------------- what must be equal


def compared(one: Path, other: Path) -> dict[str, bool]:
    a, b = (torch.load(out / "final.pt", weights_only=True) for out in (one, other))
    return {
        "weights_equal": a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a),
        "trained_equal": trained(one) == trained(other),
        "figures_equal": list(figures(one)) == list(figures(other)),
        "each_once": each_once(one),
    }


def trained(out: Path) -> list[tuple[int, int]]:
    """(iteration, group) of everything released to be trained; a group is all its samples."""
    return [(e["step"], g) for e in Run(out).events("trained") for g in e["groups"]]


def figures(out: Path) -> Iterator[dict[str, Any]]:
    """Rewards, losses, lengths, entropies, shares of every iteration; only clocks may differ."""
    for e in Run(out).events("rl_step"):
        yield {k: v for k, v in e.items() if k != "t" and not k.endswith("_s")}


def each_once(out: Path) -> bool:
    """Every group that was drawn was trained once or is still in the pool."""
    groups = [g for _, g in trained(out)]
    parked = park.read(park.files(out / "park")[-1])
    return len(groups) == len(set(groups)) and sorted([*groups, *parked.held]) == list(range(parked.next_group))
