"""The loop: it finishes at any fraction, counts what it should, and what breaks ends one attempt, not the run."""

from __future__ import annotations

import copy
import json
import math

import made
import pytest
import tiny
import torch

from nonet.rl import Loop, RLConfig, park
from nonet.rl.loop import summary
from nonet.run import Run
from nonet.types import Segment

FAST = dict(groups=3, samples=3, max_tokens=36, temperature=1.2, lr=1e-3, warmup=0, steps=6)


@pytest.fixture
def loop(policy, nano, tmp_path):
    def start(rewards=None, **over) -> Loop:
        setting = tiny.setting(nano, rewards=rewards or {"varied": tiny.varied})
        return Loop(policy, setting, RLConfig(**{**FAST, **over}), Run(tmp_path), seed=2)

    return start


def events(loop: Loop, kind: str) -> list[dict]:
    return list(loop.run.events(kind))


def parked(loop: Loop) -> park.Parked:
    return park.read(park.files(loop.run.path / "park")[-1])


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_it_finishes_at_any_fraction_with_the_books_in_order(loop, fraction):
    """Below one half a loop that counted finished members toward the quota would stop moving."""
    made_ = loop(fraction=fraction, steps=8)
    made_.fit()
    trained = [g for e in events(made_, "trained") for g in e["groups"]]
    assert len(trained) == len(set(trained))
    assert sorted([*trained, *made_.pool.held]) == list(range(made_.pool.next_group))
    assert len(trained) >= 8 * 3 * fraction * 0.5
    for e in events(made_, "rl_step"):
        assert 0 < e["active"] <= 9
        assert e["finished"] >= math.ceil(fraction * e["active"])
        assert e["finished"] + e["parked"] == e["active"]


def test_the_mtp_layer_comes_out_as_it_went_in(loop, policy):
    before = copy.deepcopy(policy.state_dict())
    loop(weight_decay=0.1, steps=3).fit()
    changed = {n for n, p in policy.state_dict().items() if not torch.equal(p, before[n])}
    assert not any(n.startswith("mtp.") for n in changed)
    assert any(n.startswith("layers.") for n in changed)


def test_a_reward_that_raises_fails_its_attempts_and_their_groups_are_released(loop):
    count = iter(range(10**6))

    def brittle(task, transcript, sandbox) -> float:
        if next(count) % 4 == 1:
            raise RuntimeError("the judge is out")
        return tiny.varied(task, transcript, sandbox)

    made_ = loop(rewards={"judge": brittle}, fraction=1.0, steps=3)
    made_.fit()
    released = list(parked(made_).gone.values())
    failed = [t for g in released for t in g if t.status == "failed"]
    assert {t.stop_reason for t in failed} == {"reward judge: RuntimeError: the judge is out"}
    assert sum(e["failed"] for e in events(made_, "rl_step")) == len(failed) > 3
    assert len(released) == 9
    assert all(len(g) == 3 for g in released)


def test_nan_rewards_leave_the_weights_finite(loop, policy):
    loop(rewards={"r": lambda task, said, box: math.nan if len(said[-1].text) % 2 else float(len(said))}, steps=3).fit()
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


def test_dead_groups_are_left_out_of_the_batch_or_kept_on_request(loop):
    """trl#6367: a dead group in the denominator scales every gradient down."""
    rewards = [[1, 1, 1], [1, 0, 0], [None, None, 1], [None, 0, 1]]
    groups = [made.group(r, i) for i, r in enumerate(rewards)]
    dropping, keeping = loop(), loop(drop_dead_groups=False)
    assert [s.trajectory.group for s in dropping.credit(groups)] == [1, 1, 1, 3, 3]
    assert [s.trajectory.group for s in keeping.credit(groups)] == [0, 0, 0, 1, 1, 1, 3, 3]


def test_all_groups_dead_is_an_iteration_that_changes_nothing(loop, policy):
    before = copy.deepcopy(policy.state_dict())
    made_ = loop(rewards={"same": lambda *_: 0.5}, fraction=1.0, steps=2)
    made_.fit()
    assert all(torch.equal(before[n], p) for n, p in policy.state_dict().items())
    assert [(e["dead_groups"], e["updates"], e["trained_tokens"]) for e in events(made_, "rl_step")] == [(3, 0, 0)] * 2
    assert made_.learner.version == made_.engine.version == 2


def test_the_summary_counts_by_hand(nano):
    setting = tiny.setting(nano)
    domains = [setting.task("train", g).domain for g in range(2)]
    assert domains == ["agents", "general"]
    first, second = made.group([1, 0], 0), made.group([0.5, None], 1)
    first[0].stop_reason = "length"
    first[0].segments[1] = Segment("policy", (1, 2, 3, 4), (-1.0, -2.0, -3.0, -4.0), (0.0,) * 4, 0)
    found = summary([first, second], setting)
    assert found["reward"] == pytest.approx(0.5)
    assert found["reward_agents"] == pytest.approx(0.5)
    assert found["reward_general"] == pytest.approx(0.5)
    assert (found["failed"], found["dead_groups"], found["tokens"], found["length"]) == (1, 1, 12, 4)
    assert found["truncated"] == pytest.approx(1 / 3)
    assert found["entropy"] == pytest.approx(10 / 12)


def test_no_complete_group_is_not_an_error(loop):
    """One attempt of nine per iteration: the first iterations have nothing to train on."""
    made_ = loop(fraction=0.01, steps=3)
    made_.fit()
    assert events(made_, "rl_step")[0]["groups"] == 0
    assert [e["step"] for e in events(made_, "rl_step")] == [1, 2, 3]


def test_stale_tokens_appear_once_versions_mix_and_masked_share_is_a_share(loop):
    made_ = loop(fraction=0.4, steps=10, lr=5e-3)
    made_.fit()
    steps = events(made_, "rl_step")
    assert steps[0]["stale"] == 0
    assert max(e["stale"] for e in steps) > 0
    assert all(0 <= e["masked"] <= 1 and 0 <= e["stale"] <= 1 for e in steps)


def test_a_finished_run_started_again_does_nothing(loop, policy):
    made_ = loop(steps=2)
    made_.fit()
    before, seen = copy.deepcopy(policy.state_dict()), list(made_.run.events())
    again = loop(steps=2)
    again.fit()
    assert list(again.run.events()) == seen
    assert all(torch.equal(before[n], p) for n, p in policy.state_dict().items())


def test_written_trajectories_hold_tokens_authors_and_logprobs(loop, tmp_path, nano):
    loop(steps=1, fraction=1.0, keep_groups=2).fit()
    lines = (tmp_path / "trajectories" / "step-000001.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["group"], r["sample"]) for r in records] == [(g, s) for g in range(2) for s in range(3)]
    for r in records:
        for s in r["segments"]:
            assert len(s["pieces"]) == len(s["tokens"])
            assert len(s["logprobs"]) == (len(s["tokens"]) if s["author"] == "policy" else 0)
        assert r["segments"][0]["author"] == "prompt"


def test_reuse_goes_on_from_old_memory_and_says_how_far_off_it_is(loop):
    """Such a log-prob is not what a fresh forward gives: reported as mismatch, not refused as a broken ratio."""
    reused = loop(fraction=0.4, steps=6, lr=2e-2, on_resume="reuse")
    reused.fit()
    steps = events(reused, "rl_step")
    assert max(e["mismatch_max"] for e in steps) > 0.02
    assert reused.engine._held.keys() <= {t.id for g in reused.pool.held.values() for t in g if t.status == "parked"}


def test_reprefill_computes_again_what_reuse_remembers(loop, policy, nano, tmp_path):
    costs = {}
    for how in ("reprefill", "reuse"):
        setting = tiny.setting(nano, rewards={"varied": tiny.varied})
        config = RLConfig(**{**FAST, "fraction": 0.4, "on_resume": how, "lr": 1e-6})
        made_ = Loop(copy.deepcopy(policy), setting, config, Run(tmp_path / how), seed=2)
        made_.fit()
        steps = events(made_, "rl_step")
        costs[how] = sum(e["prefilled"] for e in steps)
        assert (max(e["mismatch_rows"] for e in steps) > 0) == (how == "reuse")
    assert costs["reuse"] < 0.8 * costs["reprefill"]
