"""Jobs side by side: in order, a few at a time, ended together and with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nonet.pipeline.lanes import Job, run_jobs
from nonet.types import UserError

SIDE_BY_SIDE = """
import os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
(folder / f"{name}.on").touch()
time.sleep(0.3)
print(len(list(folder.glob("*.on"))), os.environ["OMP_NUM_THREADS"])
(folder / f"{name}.on").unlink()
"""


def job(folder: Path, name: str, code: str) -> Job:
    return Job(name, (sys.executable, "-c", code, str(folder), name), folder / f"{name}.log")


def test_never_more_than_the_lanes_and_all_of_them(tmp_path):
    run_jobs([job(tmp_path, str(i), SIDE_BY_SIDE) for i in range(5)], lanes=2)
    said = [(tmp_path / f"{i}.log").read_text().split() for i in range(5)]
    assert {threads for _, threads in said} == {"1"}
    assert max(int(beside) for beside, _ in said) == 2


def test_a_failure_ends_the_others_and_says_its_last_words(tmp_path):
    slow = job(tmp_path, "slow", "import time; time.sleep(60)")
    broken = job(tmp_path, "broken", "import sys; print('nonet: no tasks', file=sys.stderr); sys.exit(2)")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"broken: ended with status 2: nonet: no tasks \(all of it: .*broken\.log\)"):
        run_jobs([slow, broken], lanes=2)
    assert time.monotonic() - began < 30


class FailsOnTheSecondLook:
    """A process that ends between one look at it and the next."""

    def __init__(self):
        self.answers = [None]

    def poll(self):
        return self.answers.pop() if self.answers else 3

    def terminate(self): ...

    def wait(self, seconds=None): ...


def test_a_failure_between_two_looks_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.pipeline.lanes._started", lambda job: FailsOnTheSecondLook())
    (tmp_path / "a.log").write_text("gone\n")
    with pytest.raises(UserError, match="a: ended with status 3: gone"):
        run_jobs([job(tmp_path, "a", "")], lanes=1)


def test_jobs_end_with_a_parent_that_was_killed(tmp_path):
    child = "import os, pathlib, sys, time; from nonet.pipeline.lanes import end_with_parent; end_with_parent()"
    child += "; pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid())); time.sleep(120)"
    code = "import pathlib, sys; from nonet.pipeline.lanes import Job, run_jobs; folder = pathlib.Path(sys.argv[1])"
    code += f"; run_jobs([Job('c', (sys.executable, '-c', {child!r}, str(folder)), folder / 'log')], 1)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    pid = int((tmp_path / "pid").read_text())
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")  # ended, not yet collected
