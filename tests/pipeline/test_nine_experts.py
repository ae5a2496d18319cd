"""Experts of two domains and two efforts, one student of them all, at toy size; killed and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from test_runner import TOY

from nonet.bench import merging, merging_rivals
from nonet.model import hf
from nonet.pipeline import load_recipe, run_recipe
from nonet.pipeline.cells import cells_of
from nonet.pipeline.experts import train_one
from nonet.pipeline.main_job import NINE, stages_of
from nonet.pipeline.runner import MEASURED
from nonet.run import Run
from nonet.types import UserError

NINE_TOY = (
    TOY.replace('efforts = ["low"]', 'efforts = ["max", "low"]')
    + """
[experts]
later = { steps = 2 }
student = { steps = 2 }
[effort]
anneal = 2
[effort.budget]
tasks = 4
samples = 2
"""
)
CELLS = ["general-max", "agents-max", "general-low", "agents-low"]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "nine.toml"
    file.write_text(NINE_TOY)
    return file


@pytest.fixture(scope="module")
def finished(recipe_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "nine"
    run_recipe(load_recipe([recipe_file]), out)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return hf.load(folder).state_dict()


def test_every_cell_has_an_expert_that_began_where_it_should(recipe_file, finished):
    recipe = load_recipe([recipe_file])
    assert [c.name for c in cells_of(recipe)] == CELLS and NINE[0] in stages_of(recipe)
    for name in CELLS:
        run = Run(finished / "experts" / name)
        assert len(list(run.events("rl_step"))) == (3 if name.endswith("max") else 2)
        kept = run.path / "trajectories" / "step-000001.jsonl"
        efforts = {json.loads(line)["effort"] for line in kept.read_text().splitlines()} if kept.exists() else set()
        assert efforts <= {name.rpartition("-")[2]}
    cold = weights(finished / "models" / "cold")
    assert set(cold) == set(weights(finished / "experts" / "general-low" / "model"))


def test_experts_and_student_are_measured_on_every_cell(finished):
    run = Run(finished)
    for stage in ("eval-cold", "eval-expert", "eval-distill"):
        assert [(e["domain"], e["mode"]) for e in run.events("eval") if e["stage"] == stage] == [
            (name, mode) for name in CELLS for mode in ("sampled", "greedy")
        ]
    assert {(e["stage"], e["domain"]) for e in run.events("gain")} == {
        (stage, name) for stage in ("eval-expert", "eval-distill") for name in CELLS
    }
    assert len([e for e in run.events("rl_step")]) == 2  # the student's


def test_killed_among_the_experts_it_ends_with_the_same_student(recipe_file, finished, tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "nonet.cli", "run", str(recipe_file), "--out", str(out)]
    job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list((out / "experts").glob("*/checkpoints/rl-*")):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL)
    job.wait()
    run_recipe(load_recipe([recipe_file]), out)
    one, other = (weights(folder / "models" / "distill") for folder in (finished, out))
    assert all(torch.equal(one[n], other[n]) for n in one)
    facts = ("kind", "stage", "model", "domain", "effort", "mode")
    events = [tuple(e.get(k) for k in facts) for e in Run(out).events() if e["kind"] in MEASURED and "mode" in e]
    assert len(events) == len(set(events)) > 0


def test_levels_are_held_to_what_the_cold_start_wrote(finished):
    assert json.loads((finished / "budgets.json").read_text())["config"]["tasks"] == 4
    for name in CELLS:
        domain, level = name.split("-")
        for e in Run(finished / "experts" / name).events("rl_step"):
            assert [(row["domain"], row["effort"]) for row in e["effort"]] == [(domain, level)] * bool(e["groups"])
            assert all((row["multiplier"] is None) == (level == "max") for row in e["effort"])


def test_what_merging_kept_is_recorded_with_what_each_model_wrote(finished):
    run = Run(finished)
    cells = [(e["model"], f"{e['domain']}-{e['effort']}", e["mode"]) for e in run.events("cell")]
    assert sorted(cells) == sorted(product(("cold", "expert", "merged"), CELLS, ("sampled", "greedy")))
    measured = {(e["stage"], e["domain"], e["mode"]): e for e in run.events("eval")}
    stages = {"cold": "eval-cold", "expert": "eval-expert", "merged": "eval-distill"}
    for e in run.events("cell"):
        same = measured[stages[e["model"]], f"{e['domain']}-{e['effort']}", e["mode"]]
        assert (e["n"], e["reward"]) == (same["n"], same["reward"])
    kept = [f"{e['domain']}-{e['effort']}" for e in run.events("retention") if e["domain"] != "all"]
    assert sorted(kept) == sorted(CELLS * 2)
    assert len(list(run.events("separation"))) == 3 * 2 * 2  # models, modes, domains


def test_an_unknown_expert_is_named(finished):
    with pytest.raises(UserError, match=r"expert 'general-high': .* has none of this name"):
        train_one(finished, "general-high")


def test_every_way_of_merging_is_measured_beside_the_student(recipe_file, finished, tmp_path, monkeypatch):
    """`nonet bench merging` on a run of its own recipe's kind; what it has made it does not make again."""
    out = tmp_path / "nine"
    shutil.copytree(finished, out)
    monkeypatch.setattr(merging_rivals, "SUCCESS", -1.0)  # toy experts never succeed
    recipe = load_recipe([recipe_file])
    found = merging.of_seed(recipe, out)
    assert list(found["ways"]) == [merging.STUDENT, *merging_rivals.RIVALS]
    budget = found["ways"][merging.STUDENT]["tokens"]
    for name, way in found["ways"].items():
        assert set(way["cells"]) == {c.replace("-", ":") for c in CELLS}
        assert way["tokens"] == 0 if name == "average" else way["tokens"] > 0
    assert all(found["ways"][name]["tokens"] >= budget for name in ("mixed", "kl_topk", "kl_full"))
    assert set(found["over_best"]) == {"max", "low"} and set(found["gains"]) == set(way["cells"])
    before = {f: f.stat().st_mtime_ns for f in (out / "rivals").rglob("*.json")}
    assert merging.of_seed(recipe, out) == found
    assert before == {f: f.stat().st_mtime_ns for f in (out / "rivals").rglob("*.json")}


def test_an_average_is_the_mean_of_the_weights(finished):
    folders = [finished / "experts" / name / "model" for name in CELLS]
    mean, states = merging_rivals.average(folders).state_dict(), [weights(f) for f in folders]
    for name, w in mean.items():
        torch.testing.assert_close(w, sum(s[name] for s in states) / len(states))
