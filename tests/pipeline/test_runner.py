"""The main job end to end at toy size: stages leave what later ones read, are skipped when done, and resume inside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from nonet.model import hf
from nonet.pipeline import load_recipe, run_recipe
from nonet.pipeline.runner import MEASURED, start_over
from nonet.pipeline.stages import BEGIN, END, ONE_RUN
from nonet.run import Run
from nonet.types import UserError

STAGES = (*BEGIN, *ONE_RUN, *END)
TOY = """
[run]
threads = 1
[start]
vocab_size = 290
tokenizer_rows = 100
[model]
d_model = 16
layers = 2
heads = 2
d_ff = 24
kda_head_dim = 8
q_lora_rank = 8
kv_lora_rank = 8
qk_nope_head_dim = 4
qk_rope_head_dim = 4
v_head_dim = 8
mtp_layers = 1
[tasks]
sources = { general = "general.reverse", agents = "agents.move" }
efforts = ["low"]
harness = "terse"
[cold]
steps = 12
batch = 2
block = 2
[rl]
steps = 3
groups = 2
samples = 2
max_tokens = 12
[eval]
prompts = 3
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "toy.toml"
    file.write_text(TOY)
    return file


@pytest.fixture(scope="module")
def finished(recipe_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "toy"
    run_recipe(load_recipe([recipe_file]), out)
    return out


def weights(out: Path, name: str) -> dict[str, torch.Tensor]:
    return hf.load(out / "models" / name).state_dict()


def stages(out: Path) -> list[tuple[str, str]]:
    return [(e["name"], e["status"]) for e in Run(out).events("stage")]


def test_every_stage_ran_once_in_order_and_left_its_marker(finished):
    assert stages(finished) == [(name, status) for name, _ in STAGES for status in ("start", "done")]
    for name, _ in STAGES:
        assert json.loads((finished / "stages" / f"{name}.json").read_text())["seconds"] >= 0


def test_the_models_differ_and_carry_their_tokenizer(finished):
    cold, rl = weights(finished, "cold"), weights(finished, "rl")
    assert cold.keys() == rl.keys()
    for name in ("cold", "rl"):
        assert (finished / "models" / name / "tokenizer.json").exists()
    assert all(torch.equal(cold[n], rl[n]) for n in cold if n.startswith("mtp."))


def test_held_out_rewards_are_paired_and_the_gain_is_their_difference(finished):
    gains = list(Run(finished).events("gain"))
    assert [(g["domain"], g["mode"]) for g in gains] == [
        (d, m) for d in ("general", "agents") for m in ("sampled", "greedy")
    ]
    for g in gains:
        before, after = (
            json.loads((finished / "evals" / f"{n}-{g['domain']}-{g['mode']}.json").read_text())["rewards"]
            for n in ("cold", "rl")
        )
        assert before.keys() == after.keys()
        assert g["gain"] == pytest.approx(sum(after[k] - before[k] for k in before) / len(before))
        assert all("/heldout/" in k for k in before)


def test_a_finished_run_is_skipped_whole(finished, recipe_file, capsys):
    before = list(Run(finished).events())
    run_recipe(load_recipe([recipe_file]), finished)
    assert list(Run(finished).events()) == before
    assert "held-out reward" in capsys.readouterr().out


def test_changed_settings_are_refused(finished, recipe_file):
    with pytest.raises(UserError, match=r"rl\.lr"):
        run_recipe(load_recipe([recipe_file], ["rl.lr=0.5"]), finished)


def test_a_stage_whose_marker_is_missing_runs_again_to_the_same_end(finished, recipe_file, tmp_path):
    """As after a crash in the RL stage: its checkpoint is used, the stages before it are not repeated."""
    out = tmp_path / "toy"
    shutil.copytree(finished, out)
    for name in ("rl", "eval-rl", "sample", "report"):
        (out / "stages" / f"{name}.json").unlink()
    shutil.rmtree(out / "models" / "rl")
    run_recipe(load_recipe([recipe_file]), out)
    again = stages(out)[2 * len(STAGES) :]
    assert [name for name, status in again if status == "start"] == ["rl", "eval-rl", "sample", "report"]
    one, other = weights(finished, "rl"), weights(out, "rl")
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_run_that_lost_its_rl_checkpoint_too_reaches_the_same_weights(finished, recipe_file, tmp_path):
    out = tmp_path / "toy"
    shutil.copytree(finished, out)
    for name in ("rl", "eval-rl", "sample", "report"):
        (out / "stages" / f"{name}.json").unlink()
    shutil.rmtree(out / "models" / "rl")
    for checkpoint in Run(out).checkpoints("rl"):
        shutil.rmtree(checkpoint)
    run_recipe(load_recipe([recipe_file]), out)
    one, other = weights(finished, "rl"), weights(out, "rl")
    assert all(torch.equal(one[n], other[n]) for n in one)
    trained = [e["groups"] for e in Run(out).events("trained")]
    assert trained == [e["groups"] for e in Run(finished).events("trained")]


def test_the_report_is_written(finished):
    assert (finished / "report.html").stat().st_size > 1000


def test_a_stage_that_starts_over_leaves_no_event_twice(tmp_path):
    """kill -9 in the middle of a held-out evaluation: what it had recorded is recorded again, not beside it."""
    run = Run(tmp_path)
    run.event("eval", stage="eval-cold", domain="general")
    run.event("eval", stage="eval-rl", domain="general")
    run.event("gain", stage="eval-rl", domain="general")
    for kind in MEASURED:  # an expert's own, and any that comes to be
        run.event(kind, stage="eval-expert", domain="general")
    run.event("lm_step", stage="cold", step=1)
    left = ["eval-cold", "eval-rl", "eval-rl", "cold"]
    for name in ("eval-expert", "eval-rl", "eval-cold", "cold"):
        start_over(run, name)
        kept = left = [stage for stage in left if stage != name or name == "cold"]
        assert [e.get("stage") for e in run.events()] == kept
