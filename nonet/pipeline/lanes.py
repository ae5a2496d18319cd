"""Jobs side by side: processes, a few at a time, one thread each.

Two one-thread processes do more in a while than one with two threads, and each job keeps a run directory of its own, so
they never meet. A job ends with its parent, however that ends: its standard input is a pipe that nobody writes to, and
`end_with_parent` waits for the end of it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nonet.progress import progress
from nonet.types import UserError

LOOK_S = 0.2
KILLED_S = 10.0


@dataclass(frozen=True)
class Job:
    """What `command` prints goes to `log`, after what an earlier start printed."""

    name: str
    command: tuple[str, ...]
    log: Path


def run_jobs(jobs: Sequence[Job], lanes: int) -> None:
    """All jobs, in order, `lanes` at a time. When one fails the others are ended: UserError with its last words."""
    waiting, running = list(jobs), list[tuple[Job, subprocess.Popen[bytes]]]()
    with progress("lanes", len(jobs)) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < lanes:
                    running.append((waiting[0], _started(waiting.pop(0))))
                time.sleep(LOOK_S)
                running = [at for at, status in zip(running, _statuses(running), strict=True) if status is None]
                bar(len(jobs) - len(waiting) - len(running), ", ".join(job.name for job, _ in running))
        finally:
            for _, process in running:
                _end(process)


def end_with_parent() -> None:
    """For a job: exit at once when the process that started it is gone."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock a thread that waits would keep from the interpreter's end
            continue
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _started(job: Job) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def _statuses(running: Sequence[tuple[Job, subprocess.Popen[bytes]]]) -> list[int | None]:
    """Each job's, taken once: None while it runs. UserError for one that failed."""
    found = [process.poll() for _, process in running]
    for (job, _), status in zip(running, found, strict=True):
        if status:
            lines = job.log.read_text(errors="replace").strip().splitlines()
            said = lines[-1] if lines else "nothing was printed"
            raise UserError(f"{job.name}: ended with status {status}: {said} (all of it: {job.log})")
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
