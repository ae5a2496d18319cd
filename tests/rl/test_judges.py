"""Judges: a reward that takes its time holds up neither generation, nor the pause, nor the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from test_rollout import Stage, name

from nonet.rl.scoring import Judges
from nonet.types import Trajectory, UserError


def stage(nano, texts: list[str], reward, timeout_s: float, threads: int = 2) -> Stage:
    made = Stage(nano, {name(i): [text] for i, text in enumerate(texts)}, rewards={"r": reward})
    made.rollout._judges = Judges(made.score, timeout_s, threads)
    return made


def test_a_judge_that_sleeps_fails_its_trajectory_and_no_other(nano):
    """slime#2176: a judge that slept 600 s after the quota was reached was not cancelled, and the loop waited."""
    released = threading.Event()

    def reward(task, transcript, sandbox):
        if transcript[-1].text == "slow":
            released.wait(600)
            return 0.25
        return 1.0

    made = stage(nano, ["slow", "a", "slow", "b", "slow", "c"], reward, 0.3)
    began = time.monotonic()
    first, *_ = trajectories = made.finish()
    assert time.monotonic() - began < 20
    assert [t.status for t in trajectories] == ["failed", "done"] * 3
    assert first.stop_reason == "reward: TimeoutError: no verdict within 0.3 s (rl.score_timeout_s)"
    released.set()  # what the judge says now is not seen
    time.sleep(0.1)
    assert [t.rewards for t in trajectories] == [{}, {"r": 1.0}] * 3
    assert first.status == "failed"


def test_no_more_judges_run_at_a_time_than_allowed(nano):
    running, most, lock = [], [], threading.Lock()

    def reward(*_):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.pop()
        return 1.0

    stage(nano, list("abcdefgh"), reward, 60.0, threads=3).finish()
    assert len(most) == 8
    assert max(most) <= 3


def test_a_mistake_of_the_users_is_raised_in_the_loop(nano):
    def score(t: Trajectory, episode) -> None:
        raise UserError("task t: names no reward")

    made = stage(nano, ["a"], lambda *_: 1.0, 60.0)
    made.rollout._judges = Judges(score, 60.0, 1)
    with pytest.raises(UserError, match="names no reward"):
        made.finish()


def test_a_process_ends_though_a_judge_does_not():
    program = """
import time
from nonet.harness import Episode, load_spec
from nonet.rl.scoring import Judges
from nonet.types import Task, Trajectory
judges = Judges(lambda t, e: time.sleep(600), 0.05, 1)
t = Trajectory("t", 0, 0, status="done")
judges.submit(t, Episode(Task("t", ()), load_spec("terse"), None, None))
judges.settle()
print(t.status)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "failed\n"
