"""What is being played: tasks, harness, tokenizer, rewards and sandboxes, bound together once.

A task is a pure function of (split, index), so a trajectory's record (its group number) is enough to find its task
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nonet.chat import Tokenizer
from nonet.harness import Episode
from nonet.ops.rng import stream_key
from nonet.protocols import Reward, Sandbox, TaskSource
from nonet.sandbox import LocalSandbox
from nonet.tasks import load_reward
from nonet.types import HarnessSpec, Task, Trajectory, UserError

Split = Literal["train", "heldout"]
Cell = tuple[str, str]  # domain, effort


@dataclass(frozen=True)
class Setting:
    """efforts: each index draws one of these. rewards: used for every task in place of the ones it names (None: its
    own).
    """

    source: TaskSource
    spec: HarnessSpec
    tokenizer: Tokenizer
    rewards: Mapping[str, Reward] | None = None
    efforts: Sequence[str] = ("max",)
    seed: int = 0

    def task(self, split: Split, index: int) -> Task:
        draw = stream_key(self.seed, f"effort/{split}/{index}")[0]
        return self.source.task(split, index, self.efforts[draw % len(self.efforts)])

    def opener(self, split: Split) -> Callable[[Trajectory], Episode]:
        """open_episode for `Rollout`: group numbers index this split."""

        def open_episode(trajectory: Trajectory) -> Episode:
            task = self.task(split, trajectory.group)
            trajectory.harness = self.spec.hash
            return Episode.resume(task, self.spec, self.tokenizer, trajectory, open_sandbox)

        return open_episode

    def rewards_of(self, task: Task) -> Mapping[str, Reward]:
        if self.rewards is None and not task.rewards:
            raise UserError(
                f"task {task.id}: names no reward; give one with --reward (a built-in name or pkg.module:fn)"
            )
        return self.rewards if self.rewards is not None else {name: load_reward(name) for name in task.rewards}


def open_sandbox(task: Task, checkpoint: Any) -> Sandbox | None:
    """The task's sandbox, fresh or as it was parked; None when the task needs none."""
    if task.sandbox is None:
        return None
    return LocalSandbox(task.sandbox) if checkpoint is None else LocalSandbox.restore(checkpoint)
