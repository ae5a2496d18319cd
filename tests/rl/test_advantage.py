"""The group baseline: who is in the mean, who is trained, and that no success is lost."""

from __future__ import annotations

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.rl.advantage import GroupMean, is_dead, rewarded
from nonet.rl.config import RLConfig
from nonet.rl.invariants import InvariantError
from nonet.types import Trajectory


def worth(group: list[Trajectory], **rules) -> dict[int, float]:
    """Advantage by sample."""
    scored = GroupMean(len(group), **rules)([group])
    assert all(s.advantages == (s.advantages[0],) * s.trajectory.policy_tokens for s in scored)
    return {s.trajectory.sample: s.advantages[0] for s in scored}


def values(rewards: list[float | None], **rules) -> list[float]:
    return list(worth(made.group(rewards), **rules).values())


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
    found = GroupMean(4)(groups)
    survivors = [t for group in groups for t in group if t.status == "done"]
    assert [s.trajectory for s in found] == survivors
    assert len(survivors) == 11
    means = [0.5, 0.5, 0.75]
    assert [s.advantages[0] for s in found] == [t.reward - means[t.group] for t in survivors]


def test_a_failed_member_is_in_no_mean_and_not_trained():
    group = made.group([1, 0, None])
    group[2].rewards = {"r": -100.0}  # what a reward gave before another broke
    assert worth(group) == {0: 0.5, 1: -0.5}


def test_a_failed_member_can_be_scored_instead():
    group = made.group([1, 0, None])
    group[2].rewards = {"r": 100.0}
    assert worth(group, failed_reward=-1.0) == {0: 1.0, 1: 0.0, 2: -1.0}
    assert values([None, None], failed_reward=0.0) == []
    silent = made.group([1, 0])
    silent[1].status, silent[1].segments = "failed", silent[1].segments[:1]
    assert worth(silent, failed_reward=-1.0) == {0: 1.0}  # it counts in the mean, but wrote nothing to train


@pytest.mark.parametrize("rewards", [[None, None], [1, None, None]])
def test_fewer_than_two_scored_members_teach_nothing(rewards):
    assert values(rewards, drop_dead=False) == []
    assert is_dead(rewarded(made.group(rewards)))


def test_dead_means_all_rewards_equal():
    """trl#6367: a dead group in the denominator scales every gradient down."""
    assert is_dead(rewarded(made.group([0.3, 0.3, 0.3])))
    assert not is_dead(rewarded(made.group([0.3, 0.3, 0.4])))
    assert is_dead(rewarded(made.group([1, 1, None])))
    assert values([0.5, 0.5]) == []
    assert values([0.5, 0.5], drop_dead=False) == [0, 0]


def test_what_the_budget_ended_is_trained_or_left_out_but_always_in_the_mean():
    """trl#6369: truncated samples in a denominator they have no part in."""
    group = made.group([1, 0, 0.5])
    group[1].stop_reason = "length"
    assert worth(group) == {0: 0.5, 1: -0.5, 2: 0.0}
    assert worth(group, drop_truncated=True) == {0: 0.5, 2: 0.0}


def test_the_reward_is_the_sum_of_all_that_scored_it():
    group = made.group([0, 0])
    group[0].rewards = {"exact": 1.0, "length": -0.5}
    assert worth(group) == {0: 0.25, 1: -0.25}


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_shuffling_members_changes_no_advantage(rewards, rng):
    """verl#1129: doubt whether reordering rows breaks groups."""
    group = made.group(rewards)
    before = worth(group, drop_dead=False)
    rng.shuffle(group)
    after = worth(group, drop_dead=False)
    assert after == pytest.approx(before, abs=1e-12)
    assert sum(after.values()) == pytest.approx(0, abs=1e-9)


def test_an_incomplete_group_is_refused():
    group = made.group([1, 0, 1])
    for wrong in (group[:2], [*group[:2], group[0]]):
        with pytest.raises(InvariantError, match="group 0: its members are"):
            GroupMean(3)([wrong])


def test_the_rules_come_from_the_recipe():
    config = RLConfig(samples=5, drop_dead_groups=False, drop_truncated=True, failed_reward=-2.0)
    assert GroupMean.of(config) == GroupMean(5, False, True, None)
    assert GroupMean.of(config.model_copy(update={"failed_member": "score"})) == GroupMean(5, False, True, -2.0)
