"""Two processes taking turns: both are loaded, one works, the other is blocked in a read.

One JSON line per message.  worker -> controller: {"ready": {...}} once, {"step": {...}} per "go", {"done": {...}} at
"stop".  controller -> worker: "go" or "stop". Steps alternate in the order A B, B A, so that a drift of the machine
cancels within neighbouring pairs, and each ratio is of two steps that ran side by side.

`Turns` is the worker's end and imports only the standard library: peers use it from venvs of their own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

READY_S, STEP_S = 180.0, 90.0


class Turns:
    """The worker's end. What libraries print to stdout goes to stderr from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self, **facts: Any) -> None:
        self._say("ready", facts)

    def wait(self) -> bool:
        """Block until told: True to take one step, False to stop."""
        return sys.stdin.readline() == "go\n"

    def step(self, **figures: float) -> None:
        self._say("step", figures)

    def done(self, **figures: float) -> None:
        """Last word: the peak resident size of this process, and anything else."""
        self._say("done", {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, **figures})

    def _say(self, kind: str, body: Mapping[str, Any]) -> None:
        self._out.write(json.dumps({kind: body}) + "\n")
        self._out.flush()


class WorkerFailed(RuntimeError):
    """A worker died or went silent; the message ends with its last words."""


@dataclass(frozen=True)
class Turn:
    """One step: wall seconds from "go" to the answer, the worker's own figures, CPU seconds the other used
    meanwhile.
    """

    seconds: float
    figures: Mapping[str, float]
    other_cpu_s: float


class Worker:
    """The controller's end of one worker process; use as a context manager, so that it never outlives the bench."""

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]):
        self.name = name
        self._stderr = TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **env},
        )
        self.facts: Mapping[str, Any] = {}

    def __enter__(self) -> Worker:
        try:
            self.facts = self._hear("ready", READY_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def step(self, other: Worker) -> Turn:
        idle = other.cpu_seconds()
        began = time.perf_counter()
        self._tell("go")
        figures = self._hear("step", STEP_S)
        return Turn(time.perf_counter() - began, figures, other.cpu_seconds() - idle)

    def stop(self) -> Mapping[str, float]:
        self._tell("stop")
        return self._hear("done", STEP_S)

    def cpu_seconds(self) -> float:
        """User and system time of the process so far, all its threads; 0 where the kernel does not say."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.exists():
            return 0.0
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise WorkerFailed(self._last_words()) from e

    def _hear(self, kind: str, limit_s: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(limit_s, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise WorkerFailed(self._last_words())
        return json.loads(line)[kind]

    def _last_words(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").strip()[-2000:]
        return f"the {self.name} worker ended with status {self._process.returncode}: {tail or 'it said nothing'}"


def interleave(
    a: Worker, b: Worker, warmup: int, pairs: int, at_least: int, limit_s: float
) -> Iterator[tuple[Turn, Turn]]:
    """(a's step, b's step) side by side, after unreported warm-up pairs; once limit_s has passed, `at_least` do."""
    began, given = time.monotonic(), 0
    for i in range(warmup + pairs):
        if given >= at_least and time.monotonic() - began > limit_s:
            return
        if i % 2 == 0:
            first = a.step(b)
            second = b.step(a)
        else:
            second = b.step(a)
            first = a.step(b)
        if i >= warmup:
            given += 1
            yield first, second
