"""The staleness cap and the rule for failed members: what they promise, under any schedule."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.rl.pool import Pool, Rules
from nonet.types import Segment, Trajectory


def play(pool: Pool, iterations: int, fraction: float, lengths, fails=lambda t: False) -> dict[str, list]:
    """Attempts that need lengths(t) ticks each, all running at once; one version an iteration. Returns what was trained
    (with its age), dropped and given up.
    """
    out: dict[str, list] = {"trained": [], "dropped": [], "given up": [], "ages": []}
    for version in range(iterations):
        given_up, dropped = pool.refresh(version)
        out["given up"] += given_up
        out["dropped"] += dropped
        active = pool.take(lambda group: f"task {group}")
        due, quota = pool.due(version), math.ceil(fraction * len(active))
        live = list(active)
        while live and (len(active) - len(live) < quota or any(t.id in due for t in live)):
            for t in live:
                t.append(Segment("policy", (1,), (-0.1,), (-0.1,), version))
                if t.policy_tokens >= lengths(t):
                    t.status = "failed" if fails(t) else "done"
            live = [t for t in live if t.status not in ("done", "failed")]
        for t in live:
            t.status = "parked"
        for group in pool.release(version):
            out["trained"].append(group[0].group)
            out["ages"] += [version - t.versions[0] for t in group if t.status == "done"]
    return out


def tailed(seed: int):
    """Log-normal lengths, the same at every asking."""
    return lambda t: 1 + int(min(60, random.Random(f"{seed} {t.stream}").lognormvariate(1.5, 1.0)))


@given(
    max_age=st.integers(0, 4), stale=st.sampled_from(["drop", "recycle", "wait"]), retries=st.integers(0, 2),
    fraction=st.sampled_from([0.25, 0.5, 0.9]), seed=st.integers(0, 99),
)  # fmt: skip
def test_nothing_older_than_the_cap_is_trained_and_every_group_leaves_once(max_age, stale, retries, fraction, seed):
    """AReaL#1388: the bound on staleness broke."""
    pool = Pool(4, 3, Rules(max_age, stale, retries))
    brittle = random.Random(seed)
    out = play(pool, 40, fraction, tailed(seed), lambda t: brittle.random() < 0.1)
    assert max(out["ages"], default=0) <= max_age
    left = [*out["trained"], *out["dropped"]]
    assert len(left) == len(set(left))
    assert sorted([*left, *pool.held]) == list(range(pool.next_group))
    assert bool(out["dropped"]) <= (stale == "drop")


def test_without_a_cap_nothing_is_given_up():
    out = play(Pool(4, 3), 60, 0.5, tailed(1))
    assert out["dropped"] == out["given up"] == []
    assert max(out["ages"]) > 4


def test_a_cap_of_zero_that_waits_is_synchronous():
    pool = Pool(4, 3, Rules(0, "wait"))
    out = play(pool, 10, 0.25, tailed(2))
    assert out["trained"] == list(range(40))
    assert pool.held == {}


def test_recycled_members_draw_other_random_numbers_and_their_siblings_stay():
    pool = Pool(1, 2, Rules(1, "recycle"))
    first, second = pool.take(lambda g: "task")
    for t in (first, second):
        t.append(Segment("policy", (1,), (-0.1,), (-0.1,), 0 if t is first else 1))
        t.status = "parked"
    before = first.stream
    given_up, dropped = pool.refresh(2)
    assert (dropped, [t.policy_tokens for t in given_up]) == ([], [1])
    assert (first.status, first.segments, first.attempt) == ("new", [], 1)
    assert first.stream != before
    assert (second.status, second.attempt) == ("parked", 0)


def test_dropping_takes_the_whole_group_and_a_new_one_its_place():
    pool = Pool(2, 2, Rules(0, "drop"))
    active = pool.take(lambda g: "task")
    for t in active:
        t.append(Segment("policy", (1,), (-0.1,), (-0.1,), 0))
        t.status = "done"
    active[0].status = "parked"
    assert [g[0].group for g in pool.release(0)] == [1]
    given_up, dropped = pool.refresh(1)
    assert (len(given_up), dropped) == (2, [0])
    assert [t.group for t in pool.take(lambda g: "task")] == [2, 2, 3, 3]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_failed_member_is_tried_again_as_often_as_allowed_then_released(retries):
    pool = Pool(1, 2, Rules(retries=retries))
    attempts: list[int] = []
    released: list[list[Trajectory]] = []
    while not released:
        pool.refresh(len(attempts))
        for t in pool.take(lambda g: "task"):
            t.status = "failed" if t.sample else "done"
        attempts.append(pool.held[0][1].attempt)
        released = pool.release()
    assert attempts == list(range(retries + 1))
    assert [(t.status, t.attempt) for t in released[0]] == [("done", 0), ("failed", retries)]


@pytest.mark.parametrize("rules", [Rules(), Rules(1, "wait"), Rules(1, "recycle")])
def test_bimodal_durations_are_trained_in_their_share(rules):
    """tinker#822: discard-and-requeue never trained the 30 to 60 minute rollouts. Here those that start over pile up
    until the quota has to wait for them.
    """
    out = play(Pool(6, 2, rules), 240, 0.5, lambda t: 50 if t.group % 4 == 0 else 2)
    share = sum(g % 4 == 0 for g in out["trained"]) / len(out["trained"])
    assert share == pytest.approx(0.25, abs=0.02)
    assert bool(out["given up"]) == (rules.stale == "recycle")


def test_dropping_is_biased_and_says_whom_it_gives_up():
    out = play(Pool(6, 2, Rules(1, "drop")), 240, 0.5, lambda t: 50 if t.group % 4 == 0 else 2)
    assert not any(g % 4 == 0 for g in out["trained"])
    assert {t.group % 4 for t in out["given up"]} == {0}
    assert len(out["dropped"]) == len(set(out["dropped"])) > 100
