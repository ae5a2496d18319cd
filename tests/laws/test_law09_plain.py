"""Law 9: fraction 1.0 reproduces plain synchronous RL bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path

import plain_rl
import pytest
import tiny
import torch

from nonet.rl import Loop, RLConfig
from nonet.rl.objective import K25
from nonet.run import Run

CONFIG = RLConfig(
    steps=3, groups=3, samples=3, fraction=1.0, max_tokens=32, temperature=1.2, lr=1e-3, warmup=2, deterministic=True
)


@pytest.fixture(scope="module")
def plain(_policy, nano):
    """The final weights and the groups of the plain loop."""
    model = copy.deepcopy(_policy)
    drawn = plain_rl.plain_rl(model, setting(nano), CONFIG, seed=3)
    return model.state_dict(), drawn


def setting(nano):
    return tiny.setting(nano, rewards={"varied": tiny.varied})


def looped(policy, nano, out: Path, config: RLConfig):
    run = Run(out)
    Loop(policy, setting(nano), config, run, seed=3).fit()
    return policy.state_dict(), [e["groups"] for e in run.events("trained")]


def test_fraction_one_is_plain_synchronous_rl_bit_for_bit(plain, policy, nano, tmp_path):
    before = copy.deepcopy(policy.state_dict())
    weights, groups = looped(policy, nano, tmp_path, CONFIG)
    assert groups == plain[1]
    assert all(torch.equal(weights[name], plain[0][name]) for name in weights)
    assert any(not torch.equal(weights[name], before[name]) for name in weights)


@pytest.mark.parametrize("change", [{"fraction": 0.5}, {"k25": K25(tau=0.5)}])
def test_the_comparison_would_notice_another_algorithm(plain, policy, nano, tmp_path, change):
    weights, _ = looped(policy, nano, tmp_path, CONFIG.model_copy(update=change))
    assert any(not torch.equal(weights[name], plain[0][name]) for name in weights)


def test_the_plain_loop_is_independent_and_short():
    source = Path(plain_rl.__file__).read_text()
    assert len(source.splitlines()) <= 80
    assert not any(f"rl.{room}" in source for room in ("loop", "pool", "rollout", "advantage", "scoring"))
