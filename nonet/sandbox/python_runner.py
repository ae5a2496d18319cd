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
import threading
import time
from pathlib import Path
from typing import Any

from nonet.protocols import RunResult
from nonet.sandbox import frames, tree, workspace
from nonet.types import UserError

SERVER = Path(__file__).with_name("job_server.py")
GRACE_S = 5.0  # beyond a job's own timeout before the server itself is given up
START_S = 20.0


class PythonRunner:
    """A fork server. `run` may be called from any thread; jobs run one at a time.

    `imports` are installed packages to load before the first job; with none, jobs see the standard library only.
    """

    def __init__(self, imports: tuple[str, ...] = ()) -> None:
        self._imports = imports
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self.isolation: tuple[str, ...] = ()

    def start(self) -> subprocess.Popen[bytes]:
        """The running server; starts one if there is none (about 50 ms)."""
        with self._lock:
            return self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if not hasattr(os, "fork"):
            raise UserError(f"sandbox on {sys.platform}: running programs needs os.fork; use Linux (or WSL) or macOS")
        self.close()
        self._scratch = workspace.new_directory()
        bare = () if self._imports else ("-S",)
        command = [sys.executable, "-s", *bare, "-P", str(SERVER), self._scratch, *self._imports]
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
        memory up to 256 MB beyond the interpreter's own. The same program prints the same text each time: hashing
        and `random` are seeded.
        """
        request = {"source": source, "cwd": cwd, "timeout_s": timeout_s}
        with self._lock:
            try:
                reply = self._ask(request, timeout_s + GRACE_S)
            except BaseException:  # Ctrl-C, say: a reply that comes later must not answer the next request
                self.close()
                raise
            if reply is None:
                self.close()
                return RunResult(-9, "", "the program took its runner down")
        return RunResult(**reply)

    def _ask(self, request: Any, patience_s: float) -> Any:
        process = self._started()
        if not self._send(process, request):  # it was killed while idle: no job has started, so ask another
            self.close()
            process = self._started()
            self._send(process, request)
        return self._receive(process, patience_s)

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
        if Path(self._scratch).is_dir():  # the server was killed before it could
            tree.remove(self._scratch)

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


# By process id, so that a forked worker starts servers of its own, and by imports.
_runners: dict[tuple[int, tuple[str, ...]], PythonRunner] = {}


def runner(imports: tuple[str, ...] = ()) -> PythonRunner:
    """This process's runner that has `imports` loaded."""
    key = os.getpid(), imports
    if key not in _runners:
        _runners[key] = PythonRunner(imports)
        atexit.register(_runners[key].close)
    return _runners[key]


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
