"""Staleness bench: ages are what they are called, the toy's reward is exact, figures are paired by seed."""

from __future__ import annotations

import pytest
import torch

from nonet.bench import staleness, staleness_lab
from nonet.bench.staleness import PLANS, Plan, across, measure, played
from nonet.bench.staleness_lab import Cell, Nano, Toy, course
from nonet.rl.advantage import GroupMean
from nonet.rl.batch import Scored
from nonet.types import Trajectory, UserError


@pytest.fixture
def short(monkeypatch, tmp_path):
    monkeypatch.setattr(staleness_lab, "FOLDER", tmp_path)
    monkeypatch.setattr(Toy, "updates", 3)
    return tmp_path


@pytest.mark.parametrize("age", [0, 2])
def test_a_course_trains_batches_of_its_age_and_of_no_other(short, monkeypatch, age):
    game = Toy(Cell("toy", "k25", age), 0)
    ages: list[list[int]] = []
    step = game.learner.step

    def noting(batch):
        out = step(batch)
        ages.append([a["age"] for a in out["ages"]])
        return out

    monkeypatch.setattr(game.learner, "step", noting)
    course(game, age)
    assert ages == [[min(update, age)] for update in range(3)]  # the first are sampled by the policy at the start


def test_the_toys_reward_is_what_sampling_it_comes_to(short):
    game = Toy(Cell("toy", "k25", 0), 1)
    sampled = [t.reward for turn in range(12) for group in game.groups(turn) for t in group]
    mean, deviation = torch.tensor(sampled).mean().item(), torch.tensor(sampled).std().item()
    assert game.reward() == pytest.approx(mean, abs=4 * deviation / len(sampled) ** 0.5)


def test_the_toy_learns(short, monkeypatch):
    monkeypatch.setattr(Toy, "updates", 15)
    game = Toy(Cell("toy", "k25", 0), 0)
    before = game.reward()
    assert course(game, 0)["reward"] > before + 0.04


def test_cells_of_a_seed_differ_in_nothing_but_their_objective(short):
    one, other = (Toy(Cell("toy", name, 0), 3) for name in ("k25", "gspo"))
    assert one.secrets == other.secrets != Toy(Cell("toy", "k25", 0), 4).secrets
    a, b = ([t.tokens for g in game.groups(0) for t in g] for game in (one, other))
    assert a == b


def test_courses_are_kept_and_a_stopped_run_continues(short, monkeypatch):
    plan = Plan("toy", (0, 1), 3, (0.1,))
    monkeypatch.setattr(staleness, "OBJECTIVES", ("k25", "gspo"))
    found = played(plan)
    files = {f.name for f in (short / "results").iterdir()}
    assert len(files) == 3 * len(plan.cells()) == 30
    monkeypatch.setattr(staleness_lab, "course", lambda *_: pytest.fail("a course was run again"))
    assert played(plan) == found
    assert set(found["rewards"]) == {"k25", "gspo"}
    assert set(found["regulariser"]) == {"k25, tau 0.1, anchor behaviour", "k25, tau 0.1, anchor proximal"}
    for by_age in (*found["rewards"].values(), *found["regulariser"].values()):
        assert all(f["low"] <= f["mean"] <= f["high"] for f in by_age.values())


def test_the_plan_is_the_eight_objectives_at_ages_0_to_8():
    plan = PLANS["toy"]
    assert {c.objective for c in plan.cells()} == {"k25", "ppo", "tis", "icepop", "cispo", "gspo", "dppo", "mirror"}
    assert (min(plan.ages), max(plan.ages)) == (0, 8)
    assert all(p.seeds - 1 in staleness.STUDENT for p in PLANS.values())


def test_the_nano_policy_plays_its_recipes_tasks_at_the_age_it_is_told(short, monkeypatch):
    load, small = (
        staleness_lab.load_recipe,
        ["cold.steps=2", "start.tokenizer_rows=100", "model.layers=2", "rl.samples=2"],
    )
    monkeypatch.setattr(
        staleness_lab, "load_recipe", lambda files, set_, quick: load(files, [*set_, *small], quick=quick)
    )
    for name, value in {"updates": 2, "GROUPS": 2, "MEASURED": 3}.items():
        monkeypatch.setattr(Nano, name, value)
    staleness_lab.backbone.cache_clear()
    seen: list[list[list[Trajectory]]] = []
    monkeypatch.setattr(GroupMean, "__call__", lambda self, groups: seen.append(groups) or uneven(self, groups))
    found = course(Nano(Cell("nano", "ppo", 1), 2), 1)
    staleness_lab.backbone.cache_clear()
    drawn = [[g[0].group for g in groups] for groups in seen]
    assert drawn == [[2_000_000, 2_000_001], [2_000_002, 2_000_003], [2_000_004, 2_000_005]]
    assert [a["age"] for a in found["ages"]] == [1]
    assert 0 <= found["reward"] <= 1


def uneven(credit: GroupMean, groups: list[list[Trajectory]]) -> list[Scored]:
    """An untrained policy earns nothing: here siblings' credit differs all the same."""
    return [Scored.uniform(t, 0.5 - t.sample) for group in groups for t in group]


def test_an_interval_is_students():
    assert across([1.0, 2.0, 3.0]) == pytest.approx({"mean": 2.0, "low": 2 - 2.4841, "high": 2 + 2.4841}, abs=1e-3)


def test_an_unknown_game_is_one_sentence():
    with pytest.raises(UserError, match="use toy or nano"):
        measure(only=("chess",))
