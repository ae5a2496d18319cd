"""Running untrusted small Python programs, about a millisecond each.

Owns: the client of `job_server`: one server per process of ours, started at the first use, restarted when it dies,
closed at exit.

Invariant: `run_python` returns a RunResult for every program, however it ends; a program sees neither our memory nor
our descriptors nor our environment. `isolation()` names what the kernel enforces beyond that.
Refuses: platforms without fork, with a UserError. It is no defence against a determined attacker: programs share the
kernel with us and can read what their user can read.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from nonet.sandbox import frames
from nonet.types import RunResult, UserError

SERVER = Path(__file__).with_name("job_server.py")
GRACE_S = 5.0  # beyond a job's own timeout before the server itself is given up
START_S = 20.0
MEMORY_ROOM = 32 << 20  # bytes that must be free in /dev/shm for it to be used


def base_directory() -> str | None:
    """Where temporary directories go: memory (/dev/shm, ten times faster than a disk here) unless TMPDIR says else."""
    memory = "/dev/shm"
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return None
    room = os.statvfs(memory)
    return memory if room.f_bavail * room.f_frsize >= MEMORY_ROOM else None


class PythonRunner:
    """A fork server. `run` may be called from any thread; jobs run one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.isolation: tuple[str, ...] = ()

    def start(self) -> subprocess.Popen[bytes]:
        """The running server; starts one if there is none (about 40 ms)."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if not hasattr(os, "fork"):
            raise UserError(f"sandbox on {sys.platform}: running programs needs os.fork; use Linux (or WSL) or macOS")
        self.close()
        scratch = tempfile.mkdtemp(prefix="nonet-job-", dir=base_directory())
        command = [sys.executable, "-s", "-S", "-P", str(SERVER), scratch]
        environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": os.defpath}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment, start_new_session=True
        )
        hello = self._receive(self._process, START_S)
        if hello is None:
            self.close()
            raise UserError(f"sandbox: {sys.executable} could not start the program runner")
        self.isolation = tuple(hello["isolation"])
        return self._process

    def run(self, source: str, cwd: str | None = None, timeout_s: float = 2.0) -> RunResult:
        """Run `source` in `cwd` (by default an empty directory that is deleted afterwards).

        Times out after `timeout_s` seconds of wall clock. Each stream is kept up to 64 KB, each file up to 1 MB,
        memory up to 256 MB. The same program prints the same text each time: hashing and `random` are seeded.
        """
        request = {"source": source, "cwd": cwd, "timeout_s": timeout_s}
        with self._lock:
            for _ in range(2):  # an idle server may have been killed from outside: the job itself has not started then
                process = self.start()
                if self._send(process, request):
                    reply = self._receive(process, timeout_s + GRACE_S)
                    break
                self.close()
            else:
                reply = None
            if reply is None:
                self.close()
                return RunResult(-9, "", "the program took its runner down", timed_out=False)
        return RunResult(**reply)

    def close(self) -> None:
        """Stop the server; idempotent, and `run` starts a new one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        if process.stdin is not None:
            process.stdin.close()  # the server leaves at the end of its input, and takes its scratch directory along
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    @staticmethod
    def _send(process: subprocess.Popen[bytes], request: Any) -> bool:
        assert process.stdin is not None
        try:
            frames.write(process.stdin.fileno(), request)
        except BrokenPipeError:
            return False
        return True

    @staticmethod
    def _receive(process: subprocess.Popen[bytes], timeout_s: float) -> Any:
        assert process.stdout is not None
        return frames.read(process.stdout.fileno(), time.monotonic() + timeout_s)


_runners: dict[int, PythonRunner] = {}  # by process id, so that a forked worker starts a server of its own


def runner() -> PythonRunner:
    """This process's runner."""
    pid = os.getpid()
    if pid not in _runners:
        _runners.clear()
        _runners[pid] = PythonRunner()
        atexit.register(_runners[pid].close)
    return _runners[pid]


def run_python(source: str, cwd: str | None = None, timeout_s: float = 2.0) -> RunResult:
    """Run a program with this process's runner; see `PythonRunner.run`.

    >>> run_python("print(6 * 7)").stdout
    '42\\n'
    """
    return runner().run(source, cwd, timeout_s)


def isolation() -> tuple[str, ...]:
    """What programs are held to here: "limits" always; "writes" (only below their directory), "processes" (none) and
    "network" (none) where the kernel offers Landlock and seccomp."""
    runner().start()
    return runner().isolation
