"""`nonet bench decode`: what its ratios are, what it refuses, and that both sides of a turn do the same work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import nonet.bench as bench
from nonet import native
from nonet.bench import decode
from nonet.bench.decode_files import Files
from nonet.bench.decode_models import Case, Work, prompt, slope
from nonet.bench.turns import Turn, Worker
from nonet.types import UserError

CASE = Case("k3_b1", 1, short=2, long=6)
PAIR = decode.Pair("hf", (CASE,), "kimi", "kimi")


def turn(cpu: float, wall: float) -> Turn:
    return Turn(1.0, {"cpu_k3_b1": cpu, "wall_k3_b1": wall}, 0.0)


def test_a_ratio_is_the_median_of_theirs_over_ours_by_cpu_on_one_thread_and_by_wall_on_two():
    turns = [(turn(1.0, 1.0), turn(3.0, 8.0)), (turn(2.0, 1.0), turn(4.0, 9.0)), (turn(1.0, 2.0), turn(9.0, 9.0))]
    assert decode.figures(PAIR, turns, 1)["k3_b1_vs_hf"] == 3.0
    assert decode.figures(PAIR, turns, 2)["two_threads"]["k3_b1_vs_hf"] == 8.0


def test_a_step_costs_what_a_longer_generation_costs_more():
    assert slope((1.0, 2.0), (3.0, 10.0), CASE) == {"wall_k3_b1": 0.5, "cpu_k3_b1": 2.0}


def test_other_models_void_the_comparison():
    decode.check(PAIR, [-1.0, -2.0], {"1": -2.0005})
    with pytest.raises(AssertionError, match=r"log-probs differ by 0\.5"):
        decode.check(PAIR, [-1.0, -2.0], {"1": -2.5})


def test_unknown_parts_are_refused_and_missing_peers_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(UserError, match="only 'vlm': not one of hf, mla"):
        bench.run_bench("decode", True, ("vlm",))
    with pytest.raises(UserError, match="this bench has no parts"):
        bench.run_bench("balance", True, ("hf",))
    monkeypatch.setattr(decode, "ROOT", tmp_path)
    with pytest.raises(UserError, match="needs the vllm venv; run `make peers`"):
        decode.measure(("vllm",))


@pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
def test_ours_and_transformers_agree_on_a_model_and_report_every_case(tmp_path: Path):
    folder = Files(tmp_path, tmp_path).path("mla")
    cases = (Case("short", 2, short=1, long=3), Case("long", 1, past=4096, short=2))
    file = Work(str(folder), cases).write(tmp_path / "work.json")
    assert Work.read(file).cases == cases
    env = decode.environment(1)
    with (
        Worker("nonet", [sys.executable, "-m", "nonet.bench.decode_worker", file], env) as us,
        Worker("hf", [sys.executable, "-m", "nonet.bench.decode_hf", file], env) as them,
    ):
        decode.check(PAIR, us.facts["log_probs"], them.facts["log_probs"])
        for worker, other in ((us, them), (them, us)):
            assert set(worker.step(other).figures) == {f"{c}_{k}" for c in ("wall", "cpu") for k in ("short", "long")}


def test_prompts_differ_by_row_and_are_in_every_vocabulary():
    assert prompt(CASE, 0) != prompt(CASE, 1)
    assert all(3 <= i < 63 for row in range(64) for i in prompt(CASE, row))
