"""The stage "draft": from a policy to its own draft and its measurement, whole, killed anywhere, and switched off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nonet.draft import files, train
from nonet.draft.answers import Answer
from nonet.draft.store import mask_of
from nonet.engine.row import Drafts
from nonet.model import hf
from nonet.pipeline import draft_stage, load_recipe, run_recipe
from nonet.pipeline.draft_eval import Asked, Told
from nonet.pipeline.draft_play import Policy, answer_of
from nonet.pipeline.recipe import Recipe
from nonet.pipeline.serve_stage import served
from nonet.run import Run
from nonet.types import Segment, Trajectory, UserError

TOY = """
[run]
threads = 1
[tasks]
sources = { general = "general.reverse", agents = "agents.move" }
harness = "terse"
[rl]
steps = 1
groups = 2
samples = 2
max_tokens = 32
max_batch = 4
[eval]
prompts = 2
[draft]
prompts = 6
chosen_by = 3
measured = 5
tokens = 3
window = 64
batch_tokens = 128
[draft.train]
steps = 6
unroll = 3
eval_every = 2
[serve]
prompts = 4
clients = 2
tokens = 3
"""


@pytest.fixture(scope="module")
def recipe(policy_directory: Path, tmp_path_factory) -> Recipe:
    file = tmp_path_factory.mktemp("recipe") / "toy.toml"
    file.write_text(TOY)
    return load_recipe([file], [f"start.model={policy_directory}"])


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "toy"
    run_recipe(recipe, out)
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "models" / "draft" / "model.safetensors")


def measured(out: Path) -> list[dict]:
    return [{k: v for k, v in e.items() if k != "t"} for e in Run(out).events("draft_measured")]


def test_the_policys_mtp_layer_becomes_a_draft_that_loads_on_it(finished):
    policy = hf.load(finished / "models" / "rl")
    draft = files.load(finished / "models" / "draft", policy, files.vocabulary_hash(finished / "models" / "rl"))
    assert draft.config.form == "mtp" and draft.config.steps == 3 and draft.config.taps[-1] == policy.config.layers
    assert not (finished / "draft" / "features").exists()


def test_both_drafts_are_measured_by_domain_and_mode_and_shown(finished, recipe, capsys):
    found = measured(finished)
    assert [(e["mode"], e["domain"]) for e in found] == [
        (mode, domain) for mode in ("sampled", "greedy") for domain in ("all", "general", "agents")
    ]
    for e in found:
        for f in (e["untouched"], e["tuned"]):
            assert not f["requests"] or 1 <= f["low"] <= f["length"] <= f["high"] <= 4
        assert e["factor"] == {} or e["factor"]["low"] <= e["factor"]["ratio"] <= e["factor"]["high"]
    run_recipe(recipe, finished)
    assert "acceptance length (bonus token included)" in capsys.readouterr().out
    assert "Acceptance by position" in (finished / "report.html").read_text()


def test_clients_are_told_the_same_with_the_draft_and_without(finished, recipe, capsys):
    """Played over HTTP against two servers; greedy attempts are those of the engine, reward by reward."""
    found = list(Run(finished).events("served"))
    assert [(e["mode"], e["domain"]) for e in found] == [
        (mode, domain) for mode in ("sampled", "greedy") for domain in ("general", "agents")
    ]
    for e in found:
        alone, drafted = e["alone"], e["drafted"]
        assert alone["asked"] == 0 < drafted["asked"] and 0 <= drafted["stood"] <= drafted["asked"]
        assert alone["n"] == drafted["n"] == 4 and e["speedup"] > 0
        if e["mode"] == "greedy":
            assert (alone["reward"], alone["tokens"]) == (drafted["reward"], drafted["tokens"])
    run_recipe(recipe, finished)
    assert "held-out tasks over HTTP" in capsys.readouterr().out
    assert "Drafted tokens that stood" in (finished / "report.html").read_text()


def test_a_server_that_does_not_come_up_says_why(tmp_path):
    said = pytest.raises(UserError, match=r"serve: ended with status 2: .*config\.json")
    with said, served(tmp_path, tmp_path / "log"):
        pass


def test_answers_are_whole_episodes_with_tools_of_training_tasks(finished):
    answers = [
        Answer.of(json.loads(line))
        for file in sorted((finished / "draft" / "answers").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert len(answers) == 18 and sum(a.heldout for a in answers) == 6
    assert all("/train/2000000" in a.id for a in answers)
    assert any(len(a.rows[0].policy) > 1 for a in answers if a.domain == "agents"), "no tool was called"


def test_what_tools_and_prompts_said_is_masked_out():
    t = Trajectory("a/train/1", 1, 0, stop_reason="stop")
    t.append(Segment("prompt", (1, 2)))
    t.append(Segment("policy", (3, 4), (0.0, 0.0), (0.0, 0.0)))
    t.append(Segment("tool", (5,)))
    t.append(Segment("policy", (6,), (0.0,), (0.0,)))
    answer = answer_of(t, "a", heldout=False)
    assert mask_of(answer.rows[0]).tolist() == [False, False, True, True, False, True]
    assert (answer.turns, answer.stop) == (2, "done")


def after(calls: int, real: Callable) -> Callable:
    """`real`, until the process dies in the call after so many."""
    made = iter(range(calls))

    def call(*given, **named):
        if next(made, None) is None:
            raise KeyboardInterrupt
        return real(*given, **named)

    return call


@pytest.mark.parametrize(
    ("where", "name", "calls"),
    [
        (Policy, "_played", 2),  # in the middle of the answers
        (draft_stage, "fit", 0),  # between answers, features and training
        (train, "train_step", 5),  # while training, past a checkpoint
        (draft_stage, "measured_events", 1),  # when one mode is measured
    ],
    ids=("answers", "before training", "training", "measuring"),
)
def test_killed_anywhere_it_reaches_the_same_draft_and_says_nothing_twice(
    finished, recipe, tmp_path, monkeypatch, where, name, calls
):
    out = tmp_path / "toy"
    prepared = ("tokenizer", "cold", "rl")
    run_recipe(recipe, out, prepared)
    with monkeypatch.context() as dying:
        dying.setattr(where, name, after(calls, getattr(where, name)))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, out, ["draft"])
    assert not (out / "stages" / "draft.json").exists()
    kept = {f: f.stat().st_mtime_ns for f in (out / "draft" / "answers").iterdir()}
    run_recipe(recipe, out, ["draft"])
    assert kept and all(f.stat().st_mtime_ns == t for f, t in kept.items()), "answered again"
    one, other = weights(finished), weights(out)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert measured(out) == measured(finished)
    steps = [e["step"] for e in Run(out).events("draft_acceptance")]
    assert steps == [0, 2, 4, 6]


def test_it_can_be_switched_off(recipe, policy_directory, tmp_path):
    off = recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"prompts": 0})})
    run_recipe(off, tmp_path / "run", ["tokenizer", "cold", "rl", "draft"])
    assert not (tmp_path / "run" / "models" / "draft").exists()


def test_a_model_without_an_mtp_layer_is_refused_before_anything_runs(tmp_path):
    file = tmp_path / "toy.toml"
    file.write_text("[model]\nd_model = 16\nlayers = 2\nheads = 2\nd_ff = 24\n[draft]\nprompts = 5\nform = 'mtp'\n")
    with pytest.raises(UserError, match=r"draft\.form = mtp, draft\.prompts = 5: the model has no MTP layer"):
        load_recipe([file])


LLAMA = """
[start]
vocab_size = 290
tokenizer_rows = 100
[model]
d_model = 16
layers = 4
heads = 2
d_ff = 24
mixers = ["gqa", "gqa", "gqa", "gqa"]
rope = { theta = 1e4 }
[cold]
steps = 30
batch = 4
"""


def test_a_policy_without_an_mtp_layer_gets_a_copy_of_its_last_one(tmp_path):
    file = tmp_path / "llama.toml"
    file.write_text(TOY.replace("[draft]", "[draft]\nvocabulary = 64") + LLAMA)
    out, stages = tmp_path / "run", ["tokenizer", "cold", "rl", "draft"]
    run_recipe(load_recipe([file]), out, stages)
    policy = hf.load(out / "models" / "rl")
    draft = files.load(out / "models" / "draft", policy, files.vocabulary_hash(out / "models" / "rl"))
    assert draft.config.form == "eagle3" and draft.d2t_W is not None and len(draft.d2t_W) == 64
    assert {e["mode"] for e in measured(out)} == {"sampled", "greedy"}


def told(name: str, accepted: list[int], proposed: int, looping: bool = False) -> Told:
    return Told(Asked(name, "a", ()), Drafts(proposed, [proposed] * len(accepted), accepted), looping)


def test_the_factor_is_of_the_tasks_that_both_count():
    first = [told("x", [2, 1], 4), told("y", [4, 0], 4), told("z", [4, 4], 4, looping=True)]
    last = [told("x", [4, 3], 4), told("y", [4, 4], 4), told("z", [1, 0], 4)]
    found = draft_stage.ratio(first, last)
    assert found["ratio"] == pytest.approx((1 + 15 / 8) / (1 + 7 / 8))
    assert found["low"] <= found["ratio"] <= found["high"]
    assert draft_stage.ratio(first[2:], last[2:]) == {}
