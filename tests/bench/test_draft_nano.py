"""`nonet bench draft_nano` on a toy policy: every start and every choice gives a draft, a cell that is done is kept."""

from __future__ import annotations

import math

import pytest

from nonet.bench import draft_nano, draft_nano_lab
from nonet.bench.draft_nano import FACTORIAL, FACTORS, STARTS, TUNED, across, factors, on_the_grid
from nonet.bench.draft_nano_lab import Backbone, Cell, result
from nonet.draft import files
from nonet.harness import load_spec
from nonet.model import Model
from nonet.pipeline.draft_play import Policy
from nonet.rl.setting import Setting
from nonet.tasks import load


@pytest.fixture
def bench(policy: Model, nano, tmp_path, monkeypatch) -> Backbone:
    for name, value in (("LEARNT", 6), ("CHOSEN_BY", 3), ("MEASURED", 3), ("DRAFTED", 3), ("STEPS", 4), ("BATCH", 128)):
        monkeypatch.setattr(draft_nano_lab, name, value)
    monkeypatch.setattr(draft_nano_lab, "FOLDER", tmp_path)
    monkeypatch.setattr(draft_nano_lab, "ADDED_STEPS", 4)
    monkeypatch.setattr(draft_nano_lab, "WINDOW", 64)
    setting = Setting(load("general.reverse", seed=0), load_spec("terse"), nano)
    made = Backbone(0, Policy(policy, {"general": setting}, 24, 8))
    monkeypatch.setattr(draft_nano_lab, "backbone", lambda seed: made)
    return made


@pytest.mark.parametrize("cell", STARTS, ids=lambda c: c.name)
def test_every_start_gives_a_draft_of_the_backbone(bench, cell):
    found = result(0, cell)
    assert 1 <= found["low"] <= found["length"] <= found["high"] <= 4
    assert found["domains"].keys() == {"general"} and found["parameters"] > 0
    assert found["trained_steps"] == (4 if cell.tuned else 0)


def test_a_cell_that_is_done_is_not_run_again(bench, monkeypatch):
    cell = Cell("one step, frozen", 1, False, "kl")
    found = result(0, cell)
    monkeypatch.delattr(Backbone, "run")
    assert result(0, cell) == found


def test_a_cell_that_was_killed_before_it_was_measured_keeps_its_draft(bench, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(Policy, "told", killed)
        with pytest.raises(KeyboardInterrupt):
            result(0, TUNED)
    folder = draft_nano_lab.FOLDER / "drafts" / f"{TUNED.name}-0"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert result(0, TUNED)["length"] >= 1
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_every_cell_is_measured_at_equal_tokens(bench):
    assert result(0, Cell("one step", 1))["trained_steps"] == result(0, TUNED)["trained_steps"] == 4


def test_a_frozen_fusion_stays_what_it_was(bench):
    result(0, Cell("frozen", fusion=False))
    draft = files.load(draft_nano_lab.FOLDER / "drafts" / "frozen-0", bench.model)
    d = bench.model.config.d_model
    assert not draft.fc.weight[:, :-d].any() and draft.fc.weight[:, -d:].equal(draft.fc.weight.new_ones(d).diag())


def test_both_cells_on_the_grid_are_of_the_best_ones_choices():
    rounded, trained = on_the_grid(TUNED)
    assert rounded.quantised and trained.quantised and (rounded.tuned, trained.tuned) == (False, True)
    assert rounded.rounded_from == TUNED.name and (trained.unroll, trained.fusion, trained.loss) == (7, True, "overlap")


def test_factors_of_a_product_are_found_exactly():
    worth = {"unroll": {1: 1.0, 7: 1.5}, "fusion": {False: 1.0, True: 1.2}, "loss": {"kl": 1.0, "overlap": 1.1}}
    lengths = {
        cell.name: [
            seed * math.prod(of[getattr(cell, field)] for field, of in worth.items()) for seed in (2.0, 3.0, 5.0)
        ]
        for cell in FACTORIAL
    }
    found = factors(lengths)
    assert [found[name]["mean"] for name in FACTORS] == pytest.approx([1.5, 1.2, 1.1])
    assert all(f["low"] == pytest.approx(f["high"]) for f in found.values())


def test_the_interval_over_three_seeds_is_students():
    found = across([1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["high"] - 2 == pytest.approx(4.303 / math.sqrt(3)) == pytest.approx(
        2 - found["low"]
    )


def test_the_bench_compares_eight_cells_of_equal_tuning():
    assert len({c.name for c in FACTORIAL}) == len(FACTORIAL) == 8
    assert TUNED in FACTORIAL and draft_nano.UNTOUCHED not in FACTORIAL
