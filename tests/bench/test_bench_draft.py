"""`nonet bench draft`: its arithmetic, and what it says without a draft."""

from __future__ import annotations

import pytest
import tiny
import torch

from nonet import native
from nonet.bench import draft as bench
from nonet.bench.draft import DRAFTED, TAUS, Cycle, measure
from nonet.types import UserError


@pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
def test_the_model_of_speed_is_of_the_costs_beside_it():
    cycle = Cycle(tiny.model("gqa", layers=4, mixers=("gqa",) * 4), "float32")
    with torch.inference_mode():
        cycle.round(keep=False)
        assert not cycle.seconds
        cycle.round(keep=True)
    found = cycle.figures()
    assert found["even"] == pytest.approx(
        cycle.seconds["cycle"][0] / cycle.seconds["plain"][0] + DRAFTED * found["draft"] + found["observe"]
    )
    assert found["draft_ms"] == pytest.approx(1e3 * cycle.seconds["propose"][0] / DRAFTED)
    assert found["speedup_at_tau"] == {f"{tau:g}": pytest.approx(tau / found["even"]) for tau in TAUS}


def test_unknown_parts_are_refused_by_name():
    with pytest.raises(UserError, match="only 'fp3': not one of bf16"):
        measure(("fp3",))


def test_without_a_draft_the_recipe_that_trains_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "DRAFT", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path.parent)
    with pytest.raises(UserError, match="train one: recipes"):
        bench.acceptance(tiny.model("gqa"))
