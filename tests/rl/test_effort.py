"""Effort: the three rules by their formulas, the trap of budgets, and a loop that is held to them, killed or not."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import made
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nonet.harness import load_spec
from nonet.rl import RLConfig
from nonet.rl.advantage import GroupMean
from nonet.rl.budgets import Budgets, Measured
from nonet.rl.effort import OVER, Effort, EffortConfig, Member, budgeted, judge
from nonet.run import Run
from nonet.tasks import load
from nonet.types import EFFORTS, Task, Trajectory

LOW = {"low": (1.0, 1.0)}
BUDGETS = Budgets([Measured("general.add/train/0", t, r) for t, r in ((8, 1.0), (12, 1.0), (4, 0.0))])  # mean 8


def task(effort: str = "low") -> Task:
    return load("general.add").task("train", 0, effort)


def outcome(config: EffortConfig, members: list[tuple[int, float]], step: int = 0, effort: str = "low") -> list[float]:
    """The members' rewards under the rule."""
    verdict = judge(config, BUDGETS, task(effort), [Member(*m) for m in members], step)
    return [r if new is None else sum(new.values()) for (_, r), new in zip(members, verdict.rewards, strict=True)]


def config(rule: str = "budget", **over) -> EffortConfig:
    return EffortConfig.model_validate({"rule": rule, "multipliers": LOW, **over})


# --------------------------------------------------------------- multipliers


def test_a_multiplier_falls_from_first_to_last_and_stays():
    c = config(multipliers={"low": (4.0, 0.25)}, anneal=10)
    m = [c.multiplier(task(), step) for step in range(30)]
    assert m[0] == 4.0
    assert m[5] == pytest.approx(1.0)
    assert m[10:] == [0.25] * 20
    assert all(a > b for a, b in pairwise(m[:11]))
    assert m[1] / m[0] == pytest.approx(m[9] / m[8]), "geometric: every step takes the same share away"


def test_a_domains_own_multiplier_goes_first_and_an_unnamed_level_is_free():
    c = config(multipliers={"low": (1.0, 1.0), "general:low": (3.0, 3.0)})
    assert c.multiplier(task(), 0) == 3.0
    assert c.multiplier(load("coding.arith").task("train", 0, "low"), 0) == 1.0
    assert c.multiplier(task("max"), 0) == math.inf


@pytest.mark.parametrize("wrong", [{"small": (1, 1)}, {"low": (0, 1)}, {"low": (1, math.inf)}, {"general:": (1, 1)}])
def test_a_multiplier_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValidationError, match=r"general:'|'small'|positive and finite"):
        config(multipliers=wrong)


# --------------------------------------------------------------------- rules


def test_over_budget_is_minus_one_and_at_the_budget_is_not_over():
    assert outcome(config(), [(8, 1.0), (9, 1.0), (9, 0.0), (0, 0.0)]) == [1.0, -1.0, -1.0, 0.0]
    assert outcome(config(multipliers={"low": (2.0, 2.0)}), [(16, 1.0), (17, 1.0)]) == [1.0, -1.0]
    assert outcome(config(), [(99, 1.0), (98, 1.0)], effort="max") == [1.0, 1.0]


def test_where_all_are_over_budget_the_shortest_keep_their_reward():
    members = [(12, 1.0), (9, 0.0), (9, 1.0), (30, 1.0)]
    assert outcome(config(), members) == [-1.0, 0.0, 1.0, -1.0]
    assert outcome(config(spare_shortest=False), members) == [-1.0] * 4
    assert outcome(config(), [(12, 1.0), (8, 0.0), (9, 1.0)]) == [-1.0, 0.0, -1.0], (
        "one within budget: nobody is spared"
    )


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.0, 1.0])), min_size=2, max_size=8))
def test_a_group_of_unequal_lengths_over_budget_always_teaches_something(members):
    over = [(8 + 1 + t, r) for t, r in members]
    rewards = outcome(config(), over)
    if len({t for t, _ in over}) > 1:
        assert len(set(rewards)) > 1
        assert max(rewards) == max(r for (t, _), r in zip(over, rewards, strict=True) if t == min(t for t, _ in over))
    else:
        assert rewards == [r for _, r in over]


def test_toggle_holds_good_groups_to_the_percentile_every_other_phase():
    """Percentile 0.5 of the correct lengths 8 and 12 is 8; two steps held, two free."""
    c = config("toggle", phase=2, percentile=0.5, accuracy=0.5)
    good, bad = [(8, 1.0), (9, 1.0), (9, 0.0)], [(8, 0.0), (9, 1.0), (9, 0.0)]
    assert [outcome(c, good, step) for step in (0, 1, 4)] == [[1.0, 0.0, 0.0]] * 3
    assert [outcome(c, good, step) for step in (2, 3, 6)] == [[1.0, 1.0, 0.0]] * 3
    assert outcome(c, bad) == [0.0, 1.0, 0.0], "a group that is not good enough yet is not held"


def test_the_length_reward_is_k15s():
    c = config("length", warmup=3, weight=1.0)
    members = [(10, 1.0), (20, 1.0), (15, 1.0), (10, 0.0), (20, 0.0)]
    assert outcome(c, members, 3) == [1.5, 0.5, 1.0, 0.0, -0.5]
    assert outcome(c, members, 2) == [r for _, r in members], "plain RL first"
    assert outcome(c, [(7, 1.0), (7, 0.0)], 3) == [1.0, 0.0]
    assert outcome(config("length", weight=0.5), members) == [1.25, 0.75, 1.0, 0.0, -0.25]


# -------------------------------------------------------------------- credit


def group(setting, number: int, lengths: list[int], rewards: list[float | None]) -> list[Trajectory]:
    """Attempts at the setting's task, their policy writing `lengths` tokens."""
    out = []
    for i, (n, r) in enumerate(zip(lengths, rewards, strict=True)):
        t = made.trajectory(number, i, (("prompt", 3), ("policy", n)), task_id=setting.task("train", number).id)
        t.status, t.rewards = ("failed", {}) if r is None else ("done", {"task": r})
        out.append(t)
    return out


@pytest.fixture
def effort(nano):
    """Agents' groups (every second task), held to 10 tokens at low effort."""
    setting = tiny.setting(nano)
    budgets = Budgets([Measured("agents.move/train/0", 10, 1.0), Measured("general.reverse/train/0", 3, 1.0)])
    return Effort(config(), budgets, setting, GroupMean(samples=3))


def test_the_inner_credit_sees_the_changed_rewards(effort):
    long, short = (
        group(effort.setting, 0, [11, 9, 8], [1.0, 1.0, 0.0]),
        group(effort.setting, 2, [1, 2, 3], [1.0, 0, 0]),
    )
    scored = effort([long, short])
    assert [t.rewards for t in long] == [{OVER: -1.0}, {"task": 1.0}, {"task": 0.0}]
    assert [t.rewards for t in short] == [{"task": 1.0}, {"task": 0}, {"task": 0}]
    assert [s.advantages[0] for s in scored] == pytest.approx([-1.0, 1.0, 0.0, 2 / 3, -1 / 3, -1 / 3])
    (row,) = effort.figures["effort"]
    assert row == {
        "domain": "agents", "effort": "low", "attempts": 6, "groups": 2, "tokens": pytest.approx(34 / 6),
        "task_reward": 0.5, "reward": pytest.approx(1 / 6), "over": pytest.approx(1 / 6), "trapped": 0.0, "dead": 0.0,
        "multiplier": 1.0, "limit": 10.0,
    }  # fmt: skip
    assert "effort_warnings" not in effort.figures


def test_a_failed_member_is_neither_judged_nor_counted(effort):
    members = group(effort.setting, 0, [11, 30, 8], [1.0, None, 0.0])
    effort([members, group(effort.setting, 4, [1, 1, 1], [None, None, None])])
    assert [t.rewards for t in members] == [{OVER: -1.0}, {}, {"task": 0.0}]
    assert [r["attempts"] for r in effort.figures["effort"]] == [2]


def test_an_unlimited_level_is_reported_without_a_limit(nano, effort):
    effort.setting = tiny.setting(nano, efforts=("max",))
    effort([group(effort.setting, 0, [110, 90, 80], [1.0, 1.0, 0.0])])
    (row,) = effort.figures["effort"]
    assert (row["effort"], row["multiplier"], row["limit"], row["over"]) == ("max", None, None, 0.0)


def test_a_level_that_is_mostly_over_budget_is_warned_of(effort):
    trapped = [group(effort.setting, n, [11, 12, 13], [1.0, 1.0, 1.0]) for n in (0, 2)]
    effort([*trapped, group(effort.setting, 4, [1, 2, 3], [1.0, 0.0, 0.0])])
    assert [r["trapped"] for r in effort.figures["effort"]] == [pytest.approx(2 / 3)]
    (sentence,) = effort.figures["effort_warnings"]
    assert sentence.startswith("agents:low: every attempt was over budget in 2 of 3 groups; ")


@pytest.mark.parametrize("preset", ["terse", "plain"])
def test_the_policy_is_told_its_level_and_nothing_else_differs(nano, preset):
    prompts = {}
    for level in EFFORTS:
        setting = tiny.setting(nano, efforts=(level,), spec=load_spec(preset))
        prompts[level] = nano.decode(setting.opener("train")(Trajectory("", 1, 0)).prompt())
    assert len(set(prompts.values())) == 3
    assert len({text.replace(level, "LEVEL", 1) for level, text in prompts.items()}) == 1


# ---------------------------------------------------------------------- loop

ANNEALED = EffortConfig.model_validate({"multipliers": {"low": (1.5, 0.2)}, "anneal": 4})
SMALL = Budgets([Measured("agents.move/train/0", 24, 1.0), Measured("general.reverse/train/0", 4, 1.0)])


def held_to_budgets(policy, nano, path, steps: int, **over):
    rl = RLConfig(groups=3, samples=3, max_tokens=36, lr=1e-3, warmup=0, steps=steps, temperature=1.2, **over)
    return budgeted(policy, tiny.setting(nano), ANNEALED, SMALL, rl, Run(path), seed=2)


def rows(run: Run) -> list[list[dict]]:
    return [e["effort"] for e in run.events("rl_step")]


def test_the_loops_events_show_the_levels_as_their_budgets_fall(policy, nano, tmp_path):
    loop = held_to_budgets(policy, nano, tmp_path, 6)
    loop.fit()
    agents = {e["step"]: row for e in loop.run.events("rl_step") for row in e["effort"] if row["domain"] == "agents"}
    for step, row in agents.items():
        assert row["limit"] == pytest.approx(24 * ANNEALED.multiplier(task(), step - 1))
    assert max(row["over"] for row in agents.values()) > 0
    assert all(r["reward"] <= r["task_reward"] for found in rows(loop.run) for r in found)


def test_a_run_that_stopped_goes_on_with_the_budget_of_its_step(policy, nano, tmp_path):
    """Every verdict after a restart is that of a run that never stopped."""
    again, exact = copy.deepcopy(policy), {"deterministic": True, "save_every_s": 0}
    whole = held_to_budgets(policy, nano, tmp_path / "whole", 4, **exact)
    whole.fit()
    held_to_budgets(copy.deepcopy(again), nano, tmp_path / "cut", 2, **exact).fit()
    cut = held_to_budgets(again, nano, tmp_path / "cut", 4, **exact)
    cut.fit()
    assert rows(whole.run) == rows(cut.run)


def tightly_limited(policy, nano, path, spare: bool, steps: int):
    """A quarter of what the policy writes at errands, and tasks whose reward says nothing."""
    c = EffortConfig.model_validate({"multipliers": {"low": (0.25, 0.25)}, "spare_shortest": spare})
    setting = tiny.setting(nano, source=load("agents.move"), rewards={"even": lambda *_: 0.5})
    rl = RLConfig(groups=3, samples=6, max_tokens=48, lr=3e-3, warmup=0, steps=steps, fraction=1.0, temperature=0.7)
    return budgeted(policy, setting, c, Budgets([Measured("agents.move/train/0", 40, 1.0)]), rl, Run(path), seed=1)


def test_in_the_trap_nothing_is_learned_unless_the_shortest_are_spared(policy, nano, tmp_path):
    """The rule's reason: without it a budget that all miss leaves the weights as they were."""
    before, free = copy.deepcopy(policy.state_dict()), copy.deepcopy(policy)
    stuck = tightly_limited(policy, nano, tmp_path / "stuck", False, 1)
    stuck.fit()
    assert [row["trapped"] for (row,) in rows(stuck.run)] == [1.0]
    assert all(torch.equal(p, before[n]) for n, p in policy.state_dict().items())
    moving = tightly_limited(free, nano, tmp_path / "moving", True, 12)
    moving.fit()
    found = [row for (row,) in rows(moving.run)]
    (still,) = rows(stuck.run)[0]
    assert {k for k in still if still[k] != found[0][k]} == {"reward", "dead"}, "the same attempts, judged otherwise"
    assert sum(row["tokens"] for row in found[-3:]) < 0.5 * sum(row["tokens"] for row in found[:3])
    assert found[-1]["over"] < 0.5
