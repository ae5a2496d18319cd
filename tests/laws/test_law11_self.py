"""Law 11: a student taught by itself is told nothing. The reward is zero: to the last bit where every token is fed
alone, to 1e-4 where batches differ; and a run of it leaves the weights as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from nonet.chat import Tokenizer
from nonet.model import Model
from nonet.rl import Loop, RLConfig
from nonet.rl.advantage import Credit
from nonet.rl.batch import Scored
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.opd import distilling
from nonet.run import Run
from nonet.types import HarnessSpec, Trajectory

# Student and teacher read the same where the harness has no effort message.
SILENT = HarnessSpec("silent", call_open="<call>", call_close="</call>")
RL = {"steps": 3, "groups": 3, "samples": 2, "fraction": 0.5, "max_tokens": 24, "temperature": 1.1, "warmup": 0}


def taught_by_itself(
    policy: Model, nano: Tokenizer, directory: Path, out: Path, spec: HarnessSpec, **over: Any
) -> Loop:
    setting = tiny.setting(nano, spec=spec, rewards={"varied": tiny.varied})
    experts = {f"{domain}:low": str(directory) for domain in ("agents", "general")}
    distill = DistillConfig.model_validate({"experts": experts, **over.pop("distill", {})})
    # Without the regulariser, whose gradient is not exactly zero where learner and sampler round differently.
    rl = RLConfig.model_validate({**RL, "lr": 1e-2, "k25": {"tau": 0.0}, **over})
    return distilling(policy, setting, distill, Experts.open(distill, rl.deterministic), rl, Run(out))


class Watched:
    """A credit that remembers every advantage it gave."""

    def __init__(self, credit: Credit):
        self.credit, self.advantages = credit, list[float]()

    @property
    def figures(self) -> Mapping[str, Any]:
        return self.credit.figures

    def __call__(self, groups: Sequence[list[Trajectory]]) -> list[Scored]:
        scored = self.credit(groups)
        self.advantages += [a for s in scored for a in s.advantages]
        return scored

    def explain(self, trajectory: Trajectory) -> dict[str, list[float]]:
        return self.credit.explain(trajectory)


def played(loop: Loop) -> list[float]:
    watched = loop.credit = Watched(loop.credit)
    loop.fit()
    assert len(watched.advantages) > 50
    return watched.advantages


@pytest.mark.parametrize("student", ["current", "behaviour"])
def test_alone_the_reward_is_zero_to_the_last_bit_and_nothing_moves(policy, nano, policy_directory, tmp_path, student):
    before = copy.deepcopy(policy.state_dict())
    over = {"deterministic": True, "distill": {"student": student}}
    loop = taught_by_itself(policy, nano, policy_directory, tmp_path, SILENT, **over)
    assert set(played(loop)) == {0.0}
    assert any(e["stale"] for e in loop.run.events("rl_step"))  # attempts did cross versions
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_in_batches_the_reward_is_zero_within_1e_4(policy, nano, policy_directory, tmp_path):
    loop = taught_by_itself(policy, nano, policy_directory, tmp_path, SILENT, lr=1e-9)
    assert max(map(abs, played(loop))) < 1e-4


def test_what_the_effort_message_says_to_the_student_is_what_the_teacher_teaches(
    policy, nano, policy_directory, tmp_path
):
    """With one, the teacher is the same model under another prompt: prompt distillation, and no longer nothing."""
    spec = HarnessSpec("loud", system="{effort}", call_open="<call>", call_close="</call>")
    loop = taught_by_itself(policy, nano, policy_directory, tmp_path, spec, steps=1, fraction=1.0)
    assert max(map(abs, played(loop))) > 1e-2
