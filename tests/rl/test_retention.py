"""Cells, retention and separation: by formula, with intervals that cover, and nothing said where nothing is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tiny

from nonet.rl.budgets import BudgetConfig
from nonet.rl.evaluate import estimate, evaluate, gain
from nonet.rl.retention import Played, by_cell, retention, separation
from nonet.types import UserError

CELL = ("general", "low")


def scores(values) -> dict[str, float]:
    return {f"t{i:04d}": float(v) for i, v in enumerate(values)}


def test_a_cell_is_a_domain_at_a_level_with_its_reward_and_its_tokens(policy, nano):
    setting, config = tiny.setting(nano, rewards={"varied": tiny.varied}), BudgetConfig()
    played = evaluate(policy, setting, range(8), 1.0, 30)
    cells = by_cell(played, setting, config)
    assert list(cells) == [("agents", "low"), ("general", "low")]
    agents = [t for t in played if t.task_id.startswith("agents")]
    figures = cells["agents", "low"].figures()
    assert figures["n"] == len(agents) == 4
    assert figures["reward"] == pytest.approx(sum(t.reward for t in agents) / 4)
    assert figures["tokens"] == pytest.approx(sum(t.policy_tokens for t in agents) / 4)
    e = estimate([float(t.policy_tokens) for t in agents])
    assert (figures["tokens_low"], figures["tokens_high"]) == (e.low, e.high)
    words = [t for t in played if t.task_id.startswith("general")]
    spent = [config.spent(t, setting.task("heldout", t.group), setting) for t in words]
    assert list(cells["general", "low"].tokens.values()) == spent
    assert Played(**json.loads(json.dumps(cells["general", "low"].to_json()))) == cells["general", "low"]


def test_a_cell_in_which_everything_failed_says_why(policy, nano):
    def broken(task, transcript, sandbox):
        if sandbox is not None:
            raise RuntimeError("no disk")
        return 1.0

    setting = tiny.setting(nano, rewards={"r": broken})
    with pytest.raises(
        UserError, match="agents:low: all 2 attempts failed; the first: reward r: RuntimeError: no disk"
    ):
        by_cell(evaluate(policy, setting, range(4), 1.0, 20), setting, BudgetConfig())


# ---------------------------------------------------------------- retention


def test_retention_is_the_merged_gain_over_the_experts_on_prompts_all_have_played():
    cold, expert = scores([0, 0, 0, 1, 0]), scores([1, 1, 0, 1, 1])
    merged = {**scores([1, 0, 0, 1]), "other": 1.0}
    found, mean = retention({CELL: (cold, expert, merged)})
    kept = found[CELL]
    assert (kept.n, kept.cold, kept.expert, kept.merged) == (4, 0.25, 0.75, 0.5)
    assert kept.share is not None and mean is not None
    assert kept.share.value == mean.value == 0.5
    assert kept.gain == gain(cold, expert)
    figures = kept.figures()
    assert (figures["retention"], figures["gain"]) == (0.5, kept.gain.mean)
    json.dumps(figures, allow_nan=False)


def test_a_model_equal_to_the_expert_keeps_all_of_it_and_an_untouched_one_nothing():
    cold, expert = scores([0] * 60 + [1] * 40), scores([0] * 20 + [1] * 80)
    for merged, kept in ((expert, 1.0), (cold, 0.0)):
        share = retention({CELL: (cold, expert, merged)})[0][CELL].share
        assert share is not None
        assert (share.value, share.low, share.high) == (kept, kept, kept), "paired: exact in every draw"


def test_an_expert_no_better_than_the_cold_start_leaves_nothing_to_retain():
    cold, worse, better = scores([0, 1, 1, 0]), scores([0, 1, 0, 0]), scores([1, 1, 1, 0])
    found, mean = retention({("a", "low"): (cold, worse, cold), ("b", "low"): (cold, better, better)})
    assert found["a", "low"].share is None
    assert found["b", "low"].share is not None
    assert mean is None
    assert found["a", "low"].figures()["retention"] is None


def test_a_gain_within_the_noise_has_an_open_interval():
    """Some draws show no gain at all: any retention would fit them."""
    cold, expert = scores([0] * 30), scores([1] + [0] * 29)
    share = retention({CELL: (cold, expert, cold)})[0][CELL].share
    assert share is not None
    assert share.value == 0.0
    assert (share.low, share.high) == (None, None)


def test_a_cells_interval_does_not_depend_on_the_other_cells():
    rng = np.random.default_rng(5)
    three = tuple(scores(rng.random(50) < p) for p in (0.2, 0.8, 0.6))
    other = tuple(scores(rng.random(50) < p) for p in (0.1, 0.9, 0.3))
    alone, both = retention({CELL: three})[0], retention({CELL: three, ("agents", "max"): other})[0]  # type: ignore[dict-item]
    assert alone[CELL] == both[CELL]


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Retention 0.75 of Bernoulli rewards, 200 prompts: 60 trials at 95% must cover at least 50."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(60):
        three = tuple(scores(rng.random(200) < p) for p in (0.3, 0.7, 0.6))
        share = retention({CELL: three})[0][CELL].share  # type: ignore[dict-item]
        assert share is not None and share.low is not None and share.high is not None
        covered += share.low <= 0.75 <= share.high
    assert covered >= 50


def test_models_without_a_common_prompt_are_refused():
    with pytest.raises(UserError, match="no prompt in common"):
        retention({CELL: (scores([1]), scores([1]), {"x": 1.0})})


# --------------------------------------------------------------- separation


def level(tokens: list[float], reward: float) -> Played:
    return Played(scores([reward] * len(tokens)), scores(tokens))


def test_levels_part_where_their_intervals_do_not_touch():
    cells = {
        ("general", "low"): level([1, 2, 1, 2], 0.5), ("general", "high"): level([8, 9, 8, 9], 0.6),
        ("general", "max"): level([20, 21, 22, 21], 0.9),
        ("agents", "low"): level([1, 9, 5, 3], 0.5), ("agents", "max"): level([2, 10, 4, 6], 0.4),
    }  # fmt: skip
    agents, general = separation(cells)
    assert (general["domain"], general["separated"], general["ordered"]) == ("general", True, True)
    assert general["share"] == pytest.approx(1.5 / 21)
    assert general["tokens"]["high"][0] == 8.5
    assert (agents["separated"], agents["ordered"]) == (False, False)


def test_levels_in_the_wrong_order_are_not_separated():
    cells = {("general", "low"): level([20, 21, 20], 1.0), ("general", "max"): level([1, 2, 1], 1.0)}
    assert not separation(cells)[0]["separated"]


def test_what_is_missing_is_not_made_up():
    (alone,) = separation({("general", "low"): level([3, 4], 1.0)})
    assert (alone["share"], alone["ordered"]) == (None, None)
    assert not any(math.isnan(x) for x in alone["tokens"]["low"])
