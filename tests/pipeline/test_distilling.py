"""`nonet distill` from the command line to a report, and what it refuses before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from nonet.chat import Tokenizer
from nonet.cli import app
from nonet.model import hf
from nonet.pipeline.distilling import distill_recipe, named, run_distill
from nonet.rl import Loop
from nonet.run import Run
from nonet.types import UserError

TASKS = "agents.move,general.reverse"
SMALL = (
    "rl.steps=2",
    "rl.groups=4",
    "rl.samples=2",
    "rl.max_tokens=24",
    "rl.save_every_s=0",
    "rl.warmup=0",
    "rl.lr=0.001",
)


@pytest.fixture(scope="module")
def student(policy_directory: Path, tmp_path_factory) -> Path:
    """The drilled policy, disturbed."""
    out = tmp_path_factory.mktemp("student")
    model = hf.load(policy_directory)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=noise) * 0.02)
    hf.save(model, out)
    hf.copy_tokenizer(policy_directory, out)
    return out


def experts(where: Path | str) -> list[str]:
    return [f"{domain}:low={where}" for domain in ("agents", "general")]


def recipe(student: Path, expert: list[str], *overrides: str):
    return distill_recipe(student, expert, TASKS, "", "terse", 2, [*SMALL, *overrides])


def test_from_the_command_line_to_a_report(student, policy_directory, tmp_path):
    out = tmp_path / "run"
    options = ["--student", student, "--tasks", TASKS, "--harness", "terse", "--out", out, "--eval-prompts", 2]
    for e in experts(policy_directory):
        options += ["--expert", e]
    for s in SMALL:
        options += ["--set", s]
    result = CliRunner().invoke(app, ["distill", *map(str, options)])
    assert result.exit_code == 0, result.output
    steps = list(Run(out).events("rl_step"))
    assert [e["step"] for e in steps] == [1, 2]
    assert steps[0]["opd_kl"] > 0 and 0 <= steps[0]["opd_clipped"] <= 1
    assert set(steps[0]["opd_experts"]) <= {"agents:low", "general:low"}
    assert {e["stage"] for e in Run(out).events("gain")} == {"eval-distill"}
    before, after = (load_file(p / "model.safetensors") for p in (student, out / "models" / "distill"))
    assert before.keys() == after.keys() and any(not torch.equal(before[n], after[n]) for n in before)
    assert Tokenizer(out / "models" / "distill").stop_ids == Tokenizer(student).stop_ids
    assert (out / "report.html").exists()


def test_a_run_that_was_stopped_continues_to_the_same_weights(student, policy_directory, tmp_path, monkeypatch):
    made = recipe(student, experts(policy_directory), "rl.steps=4")
    run_distill(made, tmp_path / "whole")
    iterate = Loop.iterate

    def stopped(self: Loop):
        if self.step == 2:
            raise KeyboardInterrupt
        return iterate(self)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(Loop, "iterate", stopped)
        run_distill(made, tmp_path / "halves")
    run_distill(made, tmp_path / "halves")
    whole, halves = (load_file(tmp_path / n / "models" / "distill" / "model.safetensors") for n in ("whole", "halves"))
    assert all(torch.equal(whole[n], halves[n]) for n in whole)
    assert [e["step"] for e in Run(tmp_path / "halves").events("rl_step")] == [1, 2, 3, 4]


# --------------------------------------------------------------------- what is refused


def permuted(policy_directory: Path, out: Path) -> Path:
    """The same model under a vocabulary of the same size with two tokens exchanged."""
    hf.save(hf.load(policy_directory), out)
    hf.copy_tokenizer(policy_directory, out)
    file = out / "tokenizer.json"
    core = json.loads(file.read_text())
    vocab = core["model"]["vocab"]
    a, b = (t for t, i in vocab.items() if i in (50, 51))
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(core))
    return out


def test_a_vocabulary_of_the_same_size_with_two_tokens_exchanged_is_refused(student, policy_directory, tmp_path):
    """trl#4562, #3028, #2215."""
    other = permuted(policy_directory, tmp_path / "other")
    made = recipe(student, experts(other))
    with pytest.raises(
        UserError, match=r"expert agents:low = .*: another vocabulary: token '.+' is 50 for the student"
    ):
        run_distill(made, tmp_path / "run")


def test_equal_vocabularies_under_heads_of_other_sizes_are_not(student, policy_directory, tmp_path):
    """trl#3028: one family pads its heads to different sizes."""
    wide = tmp_path / "wide"
    small = hf.load(policy_directory)
    padded = tiny.model(vocab=small.config.vocab_size + 32, mtp_layers=1, init_std=0.1)
    hf.save(padded, wide)
    hf.copy_tokenizer(policy_directory, wide)
    run_distill(recipe(student, experts(wide), "rl.steps=1"), tmp_path / "run")
    (step,) = Run(tmp_path / "run").events("rl_step")
    assert step["opd_kl"] > 0


@pytest.mark.parametrize(
    ("expert", "told"),
    [
        (["agents:low"], "--expert agents:low: write it as domain:effort=DIR"),
        (["agents=x"], r"distill\.experts = .*'agents': name an expert domain:effort, effort one of low, high, max"),
        (["agents:mid=x"], "name an expert domain:effort, effort one of low, high, max"),
        (["agents:low=x", "agents:low=y"], "--expert agents:low=y: agents:low is already x; one expert for each"),
        ([], r"distill\.experts: none; name at least one, e\.g\. --expert general:max="),
    ],
)
def test_experts_are_named_by_domain_and_effort_once_each(expert, told, student):
    with pytest.raises(UserError, match=told):
        recipe(student, expert)


@pytest.mark.parametrize(
    ("expert", "told"),
    [
        (["agents:low"], r"no expert for general:low; give one with --expert general:low=DIR"),
        (["agents:low", "general:low", "coding:low"], "expert coding:low: none of the first 512 training tasks is one"),
        (["agents:low", "general:max"], r"no expert for (agents:max|general:low)"),
    ],
)
def test_every_task_has_an_expert_and_every_expert_tasks(expert, told, student, policy_directory, tmp_path):
    """verl: an entry that routing never reaches is silently dropped."""
    with pytest.raises(UserError, match=told):
        run_distill(recipe(student, [f"{e}={policy_directory}" for e in expert]), tmp_path)


def test_a_directory_that_is_not_there_is_one_sentence(student, tmp_path):
    with pytest.raises(UserError, match=r"expert /gone: no such directory; name a model directory, a PEFT directory"):
        run_distill(recipe(student, experts("/gone")), tmp_path)


def test_whole_distributions_are_not_asked_of_a_server(student, policy_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.rl.served.ServedTeacher.require_vocabulary", lambda *_: None)
    made = recipe(student, experts("http://127.0.0.1:9/v1"), "distill.loss=kl_topk")
    with pytest.raises(UserError, match=r"distill\.loss = kl_topk: needs the teacher's whole distribution, and http"):
        run_distill(made, tmp_path)


def test_names_are_read_up_to_the_first_equals_sign():
    assert named(["agents:low=http://h/v1#a=b"]) == {"agents:low": "http://h/v1#a=b"}


def test_tasks_are_played_at_the_efforts_that_have_experts(student):
    assert recipe(student, ["agents:low=x"]).tasks.efforts == ("low",)
    assert recipe(student, ["agents:max=x", "general:low=y", "general:max=x"]).tasks.efforts == ("low", "max")
