"""The group baseline: who is in the mean, and that no success is lost."""

from __future__ import annotations

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.rl.advantage import advantages, is_dead


def values(rewards: list[float | None]) -> list[float]:
    return [a for _, a in advantages(made.group(rewards))]


def test_the_single_success_of_a_group_is_kept():
    """NeMo-RL#3469, #4158: a leave-one-out deviation of zero turned [1, 0, 0, 0] into [0, 0, 0, 0]."""
    assert values([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert values([0, 1, 1, 1]) == [-0.75, 0.25, 0.25, 0.25]


def test_no_division_by_the_deviation():
    assert values([0.0, 2.0]) == [-1.0, 1.0]
    assert values([0.0, 0.002]) == pytest.approx([-0.001, 0.001])


def test_groups_of_4_3_4_survivors_are_normalised_each_by_its_own():
    """AReaL#1419: fixed strides of 4 took a member of the third group into the mean of the second."""
    groups = [made.group([1, 0, 0, 1], 0), made.group([None, 1, 0, 0.5], 1), made.group([1, 1, 1, 0], 2)]
    means = [0.5, 0.5, 0.75]
    for group, mean in zip(groups, means, strict=True):
        scored = advantages(group)
        assert [t for t, _ in scored] == [t for t in group if t.status == "done"]
        assert [a for _, a in scored] == [t.reward - mean for t, _ in scored]


def test_a_failed_member_is_in_no_mean_and_not_trained():
    group = made.group([1, 0, None])
    group[2].rewards = {"r": -100.0}  # what a reward gave before another broke
    assert [a for _, a in advantages(group)] == [0.5, -0.5]


@pytest.mark.parametrize("rewards", [[None, None], [1, None, None], []])
def test_fewer_than_two_scored_members_teach_nothing(rewards):
    assert values(rewards) == []
    assert is_dead(advantages(made.group(rewards)))


def test_dead_means_all_rewards_equal():
    assert is_dead(advantages(made.group([0.3, 0.3, 0.3])))
    assert not is_dead(advantages(made.group([0.3, 0.3, 0.4])))
    assert is_dead(advantages(made.group([1, 1, None])))


def test_the_reward_is_the_sum_of_all_that_scored_it():
    group = made.group([0, 0])
    group[0].rewards = {"exact": 1.0, "length": -0.5}
    assert [a for _, a in advantages(group)] == [0.25, -0.25]


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_shuffling_members_changes_no_advantage(rewards, rng):
    """verl#1129: doubt whether reordering rows breaks groups."""
    group = made.group(rewards)
    before = {t.id: a for t, a in advantages(group)}
    rng.shuffle(group)
    after = {t.id: a for t, a in advantages(group)}
    assert after == pytest.approx(before, abs=1e-12)
    assert sum(after.values()) == pytest.approx(0, abs=1e-9)
