"""The program runner against hostile programs: each must come back as a RunResult, and the next program must run."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from nonet.protocols import RunResult
from nonet.sandbox import isolation, python_runner, run_python
from nonet.sandbox.python_runner import PythonRunner
from nonet.types import UserError

TIMEOUT = 0.5


@pytest.fixture(autouse=True)
def _still_works_afterwards():
    yield
    assert run_python("print('alive')") == RunResult(0, "alive\n", "")


def enforced(what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(what not in isolation(), reason=f"this kernel does not enforce {what!r}")


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("raise SystemExit(256 + 3)", 3),
        ("import os; os._exit(4)", 4),
        ("raise KeyboardInterrupt", 1),
        ("syntax error", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import ctypes; ctypes.string_at(0)", -11),
        ("def f(): f()\nf()", 1),
        ("x = [0] * 10**9", 1),
        ("x = []\nwhile True: x.append(bytearray(10**6))", 1),
        ("print('\\ud800')", 0),
        ("\ud800", 1),
        ("import sys; sys.stdout.close(); sys.stderr.close()", 0),
        ("import sys; sys.stdout = sys.stderr = None", 0),
        ("import os\nfor fd in range(3, 300):\n  try: os.write(fd, b'x' * 100); print(fd)\n  except OSError: pass", 0),
        ("import builtins; builtins.compile = builtins.exec = None", 0),
        ("import atexit, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", 0),
    ],
)
def test_every_way_to_end_is_reported(program: str, status: int):
    result = run_python(program, timeout_s=5.0)
    assert (result.status, result.timed_out) == (status, False), result


def test_streams_come_back_apart_and_tracebacks_show_the_programs_own_lines():
    result = run_python("import sys\nprint('out')\nprint('err', file=sys.stderr)\n{}['key']")
    assert result.stdout == "out\n"
    assert result.stderr.startswith('err\nTraceback (most recent call last):\n  File "program.py", line 4, in')
    assert result.stderr.endswith("KeyError: 'key'\n")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "print('x' * 3, flush=True)\nwhile True: pass",
    ],
)
def test_what_does_not_end_is_killed_in_time(program: str):
    start = time.monotonic()
    result = run_python(program, timeout_s=TIMEOUT)
    assert (result.status, result.timed_out) == (-9, True)
    assert time.monotonic() - start < TIMEOUT + 5
    assert result.stdout == ("xxx\n" if "print" in program else "")


def test_huge_output_is_cut_and_does_not_block():
    result = run_python("while True: print('x' * 1000)", timeout_s=5.0)
    assert not result.timed_out
    assert len(result.stdout) < 70_000
    assert result.stdout.endswith("bytes")


def test_threads_finish_before_the_program_does():
    program = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()"
    assert run_python(program).stdout == "late\n"


def test_the_same_program_prints_the_same():
    program = "import random; print(random.random(), list({'a', 'b', 'c', 'd'}), hash('x'))"
    assert run_python(program) == run_python(program)


def test_programs_do_not_see_each_other_or_us(monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    run_python("import json, builtins; json.dumps = None; builtins.leak = 1; open('left', 'w').close()")
    look = (
        "import os, json, sys, builtins\nprint(os.listdir(), json.dumps(1), hasattr(builtins, 'leak'))\n"
        "print('SECRET' in os.environ, 'nonet' in sys.modules)"
    )
    assert run_python(look).stdout == "[] 1 False\nFalse False\n"


def test_a_program_runs_in_its_directory_and_can_import_from_it(tmp_path: Path):
    (tmp_path / "mine.py").write_text("value = 5")
    assert run_python("import mine; print(mine.value); open('x', 'w').write('y')", str(tmp_path)).stdout == "5\n"
    assert (tmp_path / "x").read_text() == "y"


# ------------------------------------------------------------ confinement


@enforced("processes")
@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['ls'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.execv('/bin/sh', ['sh'])",
    ],
)
def test_no_other_process_can_be_made_or_harmed(program: str):
    result = run_python(program, timeout_s=5.0)
    assert result.status == 1
    assert "PermissionError" in result.stderr


@enforced("network")
def test_no_network():
    assert "PermissionError" in run_python("import socket; socket.socket()").stderr


@enforced("writes")
def test_no_write_outside_the_directory(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "victim").write_text("safe")
    actions = (
        "open('../new', 'w')",
        "open('../victim', 'a')",
        "os.unlink('../victim')",
        "os.truncate('../victim', 0)",
        "os.rename('../victim', 'mine')",
        "os.mkdir('../d')",
    )
    for action in actions:
        result = run_python(f"import os\n{action}", str(tmp_path / "in"))
        assert "Error" in result.stderr, action
    assert {p.name for p in tmp_path.iterdir()} == {"in", "victim"}
    assert (tmp_path / "victim").read_text() == "safe"


def test_no_file_grows_beyond_its_limit():
    assert "File too large" in run_python("open('a', 'w').write('x' * (2 << 20))").stderr


@pytest.fixture
def plain_runner(tmp_path: Path, monkeypatch):
    """A runner as on a kernel without seccomp and Landlock."""
    home = tmp_path / "sandbox"
    shutil.copytree(python_runner.SERVER.parent, home)
    text = (home / "confine.py").read_text()
    (home / "confine.py").write_text(text.replace('sys.platform == "linux" else None', "False else None"))
    monkeypatch.setattr(python_runner, "SERVER", home / "job_server.py")
    runner = PythonRunner()
    yield runner
    runner.close()


def test_without_the_kernels_help_limits_and_the_process_group_remain(plain_runner: PythonRunner, tmp_path: Path):
    plain_runner.start()
    assert plain_runner.isolation == ("limits",)
    program = "import os, time\nif os.fork() == 0: time.sleep(0.3); open('late', 'w').close()\nelse: time.sleep(0.01)"
    assert plain_runner.run(program, str(tmp_path)).status == 0
    assert plain_runner.run("while True: pass", timeout_s=0.2).timed_out
    time.sleep(0.4)
    assert not (tmp_path / "late").exists()  # the grandchild died with its group


def test_a_program_that_kills_the_server_is_reported_and_a_new_server_starts(plain_runner: PythonRunner):
    result = plain_runner.run("import os, time; os.kill(os.getppid(), 9); time.sleep(5)")
    assert result.status == -9
    assert "runner" in result.stderr
    assert plain_runner.run("print(1)").stdout == "1\n"


# --------------------------------------------------------------- the server


def test_the_server_starts_again_when_it_has_died():
    server = python_runner.runner().start()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert run_python("print(2)").stdout == "2\n"


def test_an_interrupted_wait_does_not_shift_the_replies(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PythonRunner, "_receive", interrupt)
        run_python("print('first')")
    assert run_python("print('second')").stdout == "second\n"


def test_closing_leaves_nothing_behind():
    runner = PythonRunner()
    place = Path(runner.run("import os; print(os.getcwd())").stdout.strip())
    process = runner.start()
    runner.close()
    runner.close()
    assert process.poll() is not None
    assert not place.exists()


def test_threads_may_share_the_runner():
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = run_python(f"print({i})").stdout

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"{i}\n" for i in range(8)}


def test_a_forked_process_gets_its_own_server():
    python_runner.runner().start()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if run_python("print(3)").stdout == "3\n" else 1
            python_runner.runner().close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run_python("print(4)").stdout == "4\n"


def test_without_fork_the_error_says_what_to_use(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UserError, match=r"needs os\.fork; use Linux"):
        PythonRunner().run("pass")
