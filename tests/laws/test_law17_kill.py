"""Law 17: kill -9 at any instant, resume: every sampled prompt is trained exactly once and the final weights are the
uninterrupted run's. OpenRLHF#1322, NeMo-RL#3599, trl#7274, AReaL#1388."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rl_job
import torch

from nonet.rl import park
from nonet.run import Run

PATIENCE_S = 120


@pytest.fixture(scope="module")
def server(policy_directory, tmp_path_factory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that starts the run again and again, and its run directory."""
    out = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join(str(Path(rl_job.__file__).parents[i]) for i in (1, 2))
    process = subprocess.Popen(
        [sys.executable, rl_job.__file__, str(policy_directory), str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield process, out
    process.stdin.close()
    process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def uninterrupted(server, policy_directory, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    rl_job.job(policy_directory, out)
    return out


@pytest.fixture(scope="module")
def killed(server, uninterrupted) -> Path:
    """The same run, killed three times at seeded moments and started again each time."""
    process, out = server
    rng = random.Random(20_260_801)
    for least in sorted(rng.sample(range(2, rl_job.CONFIG.steps - 6), 3)):
        pid = start(process)
        deadline = time.monotonic() + PATIENCE_S
        while last_step(out) < least:
            assert not (out / "error.txt").exists(), (out / "error.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.003)
        time.sleep(rng.uniform(0, 0.25))
        os.kill(pid, signal.SIGKILL)
        assert int(process.stdout.readline()) == -signal.SIGKILL
        assert not (out / "final.pt").exists()
    start(process)
    assert int(process.stdout.readline()) == 0, (out / "error.txt").read_text()
    return out


def start(process: subprocess.Popen[str]) -> int:
    """Start the run; returns the process id."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def last_step(out: Path) -> int:
    """The last iteration in the events, read as another process may: the last line may be torn."""
    file = out / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return max((e["step"] for e in map(json.loads, lines) if e["kind"] == "rl_step"), default=0)


def trained(out: Path) -> list[tuple[int, int]]:
    return [(e["step"], g) for e in Run(out).events("trained") for g in e["groups"]]


def test_every_group_is_trained_exactly_once_or_still_in_the_pool(killed):
    groups = [g for _, g in trained(killed)]
    (file,) = park.files(killed / "park")
    parked = park.read(file)
    assert len(groups) == len(set(groups))
    assert sorted([*groups, *parked.held]) == list(range(parked.next_group))


def test_the_same_groups_are_trained_in_the_same_iterations(killed, uninterrupted):
    assert trained(killed) == trained(uninterrupted)


def test_the_final_weights_are_those_of_the_uninterrupted_run(killed, uninterrupted, policy_directory):
    one, other = (torch.load(d / "final.pt", weights_only=True) for d in (killed, uninterrupted))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_everything_measured_is_the_same_too(killed, uninterrupted):
    """Rewards, losses, lengths, entropies of every iteration, each once; only clocks may differ."""

    def measured(out: Path) -> Iterator[dict]:
        for e in Run(out).events("rl_step"):
            yield {k: v for k, v in e.items() if k != "t" and not k.endswith("_s")}

    assert list(measured(killed)) == list(measured(uninterrupted))
    assert [e["step"] for e in measured(killed)] == list(range(1, rl_job.CONFIG.steps + 1))


def test_the_run_under_test_parks_and_mixes_versions(uninterrupted):
    steps = list(Run(uninterrupted).events("rl_step"))
    assert max(e["parked"] for e in steps) > 0
    assert max(e["stale"] for e in steps) > 0
