"""Give ended trajectories their rewards. A reward that breaks, or takes too long, marks its trajectory as failed, with
the reason.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nonet.harness import Episode
from nonet.protocols import Reward
from nonet.types import Task, Trajectory

Score = Callable[[Trajectory, Episode], None]


def scorer(rewards: Callable[[Task], Mapping[str, Reward]]) -> Score:
    """Score for `Rollout`: every reward the task names, computed while the sandbox is still open."""

    def score(trajectory: Trajectory, episode: Episode) -> None:
        for name, reward in rewards(episode.task).items():
            try:
                value = float(reward(episode.task, episode.transcript, episode.sandbox))
                if not math.isfinite(value):  # it would spread through the group's mean into every weight
                    raise ValueError(f"{value} is not a score")
                trajectory.rewards[name] = value
            except Exception as e:  # the reward edge: user code may do anything
                fail(trajectory, f"reward {name}", e)
                return

    return score


def fail(trajectory: Trajectory, edge: str, error: Exception) -> None:
    """An error at an edge to the world is data about one trajectory, not the end of the run."""
    trajectory.status, trajectory.stop_reason = "failed", f"{edge}: {type(error).__name__}: {error}"


def close(trajectory: Trajectory, episode: Episode) -> None:
    try:
        if episode.sandbox is not None:
            episode.sandbox.close()
    except Exception as e:  # the sandbox edge
        fail(trajectory, "sandbox", e)


class Judges:
    """Scores in threads while generation goes on; at most `threads` at a time that have not been given up.

    A judge works on a copy of the trajectory. One that takes longer than timeout_s is given up: its trajectory has
    failed, another takes its place, and nothing it does later is seen. Its thread is a daemon, so a judge that never
    returns keeps neither the pause nor the end of the process waiting.
    """

    def __init__(self, score: Score, timeout_s: float, threads: int):
        self.score, self.timeout_s, self.threads = score, timeout_s, threads
        self._changed = threading.Condition()
        self._queue: deque[_Case] = deque()
        self._running: list[_Case] = []
        self._judged: list[_Case] = []

    def submit(self, trajectory: Trajectory, episode: Episode) -> None:
        with self._changed:
            self._queue.append(_Case(trajectory, episode, replace(trajectory, rewards={})))
            self._assign()

    def settle(self) -> None:
        """Wait until every trajectory is judged or given up, and say in it what came out. Raises what a score raised
        beyond the rewards it called.
        """
        with self._changed:
            self._assign()
            while self._running:
                first = min(case.began for case in self._running)
                self._changed.wait(max(0.0, first + self.timeout_s - time.monotonic()))
                self._assign()
            judged, self._judged = self._judged, []
        for case in judged:
            if case.error is not None:
                raise case.error
            t, copy = case.trajectory, case.copy
            t.status, t.stop_reason, t.rewards = copy.status, copy.stop_reason, copy.rewards

    def _assign(self) -> None:
        """Give up what is overdue, and start what there is room for."""
        now = time.monotonic()
        for case in [c for c in self._running if now - c.began >= self.timeout_s]:
            # another copy: the judge may still write into its own
            case.copy = replace(case.trajectory, rewards={})
            fail(case.copy, "reward", TimeoutError(f"no verdict within {self.timeout_s:g} s (rl.score_timeout_s)"))
            self._running.remove(case)
            self._judged.append(case)
        while self._queue and len(self._running) < self.threads:
            case = self._queue.popleft()
            case.began = now
            self._running.append(case)
            threading.Thread(target=self._judge, args=(case, case.copy), daemon=True).start()

    def _judge(self, case: _Case, copy: Trajectory) -> None:
        error = None
        try:
            self.score(copy, case.episode)
        except Exception as e:  # raised again by `settle`, in the loop's thread
            error = e
        close(copy, case.episode)
        with self._changed:
            if case in self._running:
                case.error = error
                self._running.remove(case)
                self._judged.append(case)
                self._assign()
                self._changed.notify()


@dataclass(eq=False)
class _Case:
    trajectory: Trajectory
    episode: Episode
    copy: Trajectory
    began: float = 0.0
    error: Exception | None = field(default=None)
