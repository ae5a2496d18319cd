"""Held-out reward: intervals by formula, gains by pairs, attempts in order whatever the batch."""

from __future__ import annotations

import math

import pytest
import tiny

from nonet.rl.evaluate import Z95, estimate, eval_event, evaluate, gain
from nonet.types import UserError


def test_an_estimate_is_the_mean_and_its_normal_interval():
    e = estimate([0.0, 1.0, 1.0, 0.0])
    spread = Z95 * math.sqrt((4 * 0.25) / 3 / 4)
    assert (e.n, e.mean) == (4, 0.5)
    assert (e.low, e.high) == pytest.approx((0.5 - spread, 0.5 + spread))
    assert estimate([0.7]).low == estimate([0.7]).high == 0.7


def test_a_gain_is_paired_by_prompt():
    before, after = {"a": 0.0, "b": 1.0, "c": 0.5}, {"b": 1.0, "a": 1.0, "d": 9.0}
    assert gain(before, after) == estimate([1.0, 0.0])


def test_attempts_come_in_index_order_and_do_not_depend_on_the_batch(policy, nano):
    setting = tiny.setting(nano)
    one, other = (evaluate(policy, setting, range(3, 10), 1.0, 30, max_batch=b) for b in (2, 100))
    assert [t.task_id for t in one] == [setting.task("heldout", i).id for i in range(3, 10)]
    assert [t.tokens for t in one] == [t.tokens for t in other]
    assert [t.reward for t in one] == [t.reward for t in other]
    greedy = [evaluate(policy, setting, range(4), 0.0, 30) for _ in range(2)]
    assert [t.tokens for t in greedy[0]] == [t.tokens for t in greedy[1]]


def test_failed_attempts_are_counted_apart(policy, nano):
    def reward(task, transcript, sandbox):
        if sandbox is not None:
            raise RuntimeError("no")
        return 0.5

    done = evaluate(policy, tiny.setting(nano, rewards={"r": reward}), range(6), 1.0, 20)
    event = eval_event(done)
    assert (event["n"], event["failed"], event["reward"]) == (3, 3, 0.5)
    assert len([t for t in done if t.status == "done"]) == 3


def test_an_evaluation_in_which_everything_failed_says_why(policy, nano):
    """A reward with a mistake in it must come back as that mistake, not as a division by zero."""

    def reward(task, transcript, sandbox):
        raise RuntimeError("typo in my reward")

    done = evaluate(policy, tiny.setting(nano, rewards={"r": reward}), range(2), 1.0, 20)
    with pytest.raises(UserError, match="all 2 attempts failed; the first: reward r: RuntimeError: typo in my reward"):
        eval_event(done)
