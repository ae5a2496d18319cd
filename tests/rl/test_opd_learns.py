"""Distillation does what it is for: a disturbed student comes nearer to its teacher under each form."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import tiny
import torch

from nonet.rl import RLConfig
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.opd import distilling
from nonet.run import Run

STEPS = 30


@pytest.mark.parametrize(
    "over",
    [{}, {"loss": "kl_full"}, {"loss": "kl_topk", "kl": {"top_k": 32}}],
    ids=["reward", "full", "top-k and bucket"],
)
def test_the_kl_to_the_teacher_falls(over, policy, nano, policy_directory: Path, tmp_path):
    """Through partial rollouts, with effort messages that the teacher does not see."""
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=noise) * 0.03)
    experts = {f"{domain}:low": str(policy_directory) for domain in ("agents", "general")}
    config = DistillConfig.model_validate({"experts": experts, **over})
    rl = RLConfig(steps=STEPS, groups=16, samples=4, fraction=0.75, max_tokens=24, lr=1e-3, warmup=4, minibatches=1)
    setting = tiny.setting(nano, rewards={"varied": tiny.varied})
    loop = distilling(policy, setting, config, Experts.open(config), rl, Run(tmp_path), seed=1)
    loop.fit()
    kl = [e["opd_kl"] for e in loop.run.events("rl_step")]
    assert mean(kl[-6:]) < 0.75 * mean(kl[:6])
