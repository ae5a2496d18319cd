"""Law 17: kill -9 at any instant, resume: every sampled prompt is trained exactly once and the final weights are the
uninterrupted run's. OpenRLHF#1322, NeMo-RL#3599, NeMo-RL#3480, trl#7274, trl#5863, AReaL#1388, vime#324.

Three kills here; `nonet bench killed` does thirty.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nonet.bench import killed as bench
from nonet.bench.killed_worker import PHASES, job
from nonet.rl import park
from nonet.run import Run
from nonet.types import UserError

STEPS, KILLS = 14, 3


@pytest.fixture(scope="module")
def uninterrupted(policy_directory, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    job(policy_directory, out, STEPS)
    return out


@pytest.fixture(scope="module")
def killed(policy_directory, tmp_path_factory) -> Path:
    """The same run, killed in generation, in parking and in an update, and started again each time."""
    out = tmp_path_factory.mktemp("killed")
    assert list(bench.killed(policy_directory, out, STEPS, KILLS)) == list(PHASES[:KILLS])
    return out


@pytest.mark.parametrize("what", ["weights_equal", "trained_equal", "figures_equal", "each_once"])
def test_the_killed_run_is_the_uninterrupted_one(killed, uninterrupted, what):
    assert bench.compared(killed, uninterrupted)[what]


def test_every_iteration_is_there_once(killed):
    assert [e["step"] for e in bench.figures(killed)] == list(range(1, STEPS + 1))


def test_the_comparison_would_notice(killed, uninterrupted, policy_directory, tmp_path):
    job(policy_directory, tmp_path, STEPS - 1)
    same = bench.compared(tmp_path, uninterrupted)
    assert (same["weights_equal"], same["trained_equal"], same["figures_equal"]) == (False, False, False)
    assert same["each_once"]


def test_the_run_under_test_parks_and_mixes_versions(uninterrupted):
    steps = list(Run(uninterrupted).events("rl_step"))
    assert max(e["parked"] for e in steps) > 0
    assert max(e["stale"] for e in steps) > 0


def test_what_was_parked_is_on_disk_with_its_words_log_probs_and_sandbox(uninterrupted):
    """No other trainer keeps the paused prefix itself: verl asks again from the prompt, SkyRL drops it."""
    held = park.read(park.files(uninterrupted / "park")[-1]).held
    waiting = [t for members in held.values() for t in members if t.status == "parked"]
    assert any(t.policy_tokens for t in waiting)
    for t in waiting:
        for s in t.segments:
            assert len(s.logprobs) == len(s.raw_logprobs) == (len(s.tokens) if s.author == "policy" else 0)
    assert any(t.sandbox for t in waiting if t.task_id.startswith("agents."))


def test_a_checkpoint_of_an_older_nonet_is_refused_in_one_sentence(killed, policy_directory):
    (checkpoint,) = Run(killed).checkpoints("rl")
    mark = checkpoint / "park.json"
    kept = mark.read_text()
    mark.unlink()
    try:
        with pytest.raises(UserError, match=r"no park\.json; an older Nonet wrote it"):
            job(policy_directory, killed, STEPS)
    finally:
        mark.write_text(json.dumps(json.loads(kept)))
