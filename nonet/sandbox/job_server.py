"""A bare interpreter that forks once per job: the child process behind `python_runner`.

Started by path as `python -s -S -P job_server.py SCRATCH [MODULE ...]`; it never imports Nonet, so a job sees a clean,
fast Python. Speaks `frames` on its standard input and output.

Invariant: a reply is sent for every request, whatever the job did; nothing of a job outlives its reply.
Refuses: hearing from a job by any way but its exit status and its two output files.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing here would make every fork slower, as would threading, random and tempfile
    from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib would slow every start)
import confine  # noqa: E402
import frames  # noqa: E402
import tree  # noqa: E402

del sys.path[0]

OUTPUT = 64 << 10  # bytes kept of each stream
# Modules that jobs find ready. Each makes every fork slower, so no random, typing, dataclasses or threading here.
PRELOADED = ("collections", "functools", "itertools", "math", "operator", "re", "string", "traceback")
PROGRAM = "program.py"


def serve(requests: int, replies: int, scratch: str) -> None:
    """Answer until the parent closes the pipe or dies."""
    parent = os.getppid()
    frames.write(replies, {"isolation": _probe(scratch)})
    while True:
        while not select.select([requests], [], [], 5.0)[0]:
            if os.getppid() != parent:
                return
        request = frames.read(requests)
        if request is None:
            return
        frames.write(replies, run_job(request["source"], request["cwd"] or scratch, request["timeout_s"]))
        if not request["cwd"]:
            _empty(scratch)


def _probe(scratch: str) -> list[str]:
    """Ask a throw-away child what confinement this kernel gives."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(confine.confine(scratch, 1.0)).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    try:
        return json.loads(os.read(read, 4096) or b"[]")
    finally:
        os.close(read)


def _empty(scratch: str) -> None:
    """Leave the directory that jobs without one share as if it were new."""
    os.chmod(scratch, 0o700)  # noqa: PTH101
    if os.listdir(scratch):  # noqa: PTH208
        tree.remove(scratch)
        os.mkdir(scratch, 0o700)  # noqa: PTH102


def run_job(source: str, cwd: str, timeout_s: float) -> dict[str, Any]:
    out, err = _output_file(cwd), _output_file(cwd)
    try:
        pid = os.fork()
        if pid == 0:
            _child(source, cwd, timeout_s, out, err)
        timed_out = not _wait(pid, timeout_s)
        status = _end(pid)
        return {"status": status, "stdout": _text(out), "stderr": _text(err), "timed_out": timed_out}
    finally:
        os.close(out)
        os.close(err)


def _output_file(directory: str) -> int:
    """A nameless file rather than a pipe: a job can neither fill it up and block, nor hold it open after its end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("output")
    name = f"{directory}/.output-{os.getpid()}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)  # noqa: PTH108
    return fd


def _text(fd: int) -> str:
    size = os.fstat(fd).st_size
    text = os.pread(fd, OUTPUT, 0).decode("utf-8", "replace")
    return text if size <= OUTPUT else f"{text}\n... cut at {OUTPUT} of {size} bytes"


def _wait(pid: int, timeout_s: float) -> bool:
    """True once the job has ended by itself (it stays a zombie, so its process group can still be named)."""
    if hasattr(os, "pidfd_open"):
        fd = os.pidfd_open(pid)
        try:
            return bool(select.select([fd], [], [], timeout_s)[0])
        finally:
            os.close(fd)
    deadline, pause = time.monotonic() + timeout_s, 0.0005
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True


def _end(pid: int) -> int:
    """Kill the whole process group, collect the job, and return its exit status (negative: the signal)."""
    for kill in (os.killpg, os.kill):  # the group may not exist yet if the job was stopped in its first instant
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------- the child


def _child(source: str, cwd: str, timeout_s: float, out: int, err: int) -> NoReturn:
    status = 1
    try:
        _attach(cwd, out, err)
        confine.confine(cwd, timeout_s)
        status = _execute(source)
    except BaseException as e:
        _complain(e)
    finally:
        _flush()
        os._exit(status)


def _attach(cwd: str, out: int, err: int) -> None:
    """Own process group, own directory, and no file descriptor but the three standard ones."""
    os.setsid()
    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((out, 1), (err, 2), (null, 0)):
        os.dup2(source, target)
    os.closerange(3, 1 << 16)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1)
    sys.stderr = sys.__stderr__ = _stream(2)


def _stream(fd: int) -> Any:
    return open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _execute(source: str) -> int:
    """Run the program as `__main__` and map how it ended to an exit status, as the real interpreter does."""
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv[:] = [PROGRAM]
    sys.path.insert(0, "")
    gc.enable()
    if "random" in source:
        __import__("random").seed(0)
    try:
        exec(compile(source, PROGRAM, "exec"), main.__dict__)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads, as an interpreter does at its end
    except SystemExit as e:
        return _exit_status(e.code)
    except BaseException as e:
        _complain(e, source)
        return 1
    return 0


def _complain(e: BaseException, source: str = "") -> None:
    """The traceback without our own frames, or only its last line if the job left no room for more."""
    try:
        import linecache
        import traceback

        linecache.cache[PROGRAM] = (len(source), None, source.splitlines(True), PROGRAM)
        first = e.__traceback__.tb_next if e.__traceback__ else None
        text = "".join(traceback.format_exception(type(e), e, first, limit=-8))
    except BaseException:
        text = f"{type(e).__name__}\n"
    os.write(2, text.encode("utf-8", "backslashreplace"))


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the job closed or replaced it, or its file is full
            continue


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.dup(0), os.dup(1)
    os.set_inheritable(requests, False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    scratch, *imports = sys.argv[1:]
    for name in (*PRELOADED, *imports):
        __import__(name)
    gc.disable()
    gc.freeze()
    confine.allow_memory()
    try:
        serve(requests, replies, scratch)
    finally:
        tree.remove(scratch)


if __name__ == "__main__":
    main()
