"""`nonet bench opd_step`: both sides do the stated work, at toy size."""

from __future__ import annotations

import pytest

from nonet.bench import opd_step, rl_step
from nonet.bench.opd_step_worker import teacher_of
from nonet.bench.rl_step_worker import write_model
from nonet.bench.workload import Workload
from nonet.types import UserError

TOY = Workload(prompts=2, samples=2, new_tokens=5, threads=1)


def test_without_the_peer_venv_one_sentence_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(rl_step, "ROOT", tmp_path)
    with pytest.raises(UserError, match="needs the TRL venv; run `make peers`"):
        opd_step.measure(TOY)


def test_the_workload_is_the_stated_one(tmp_path):
    assert (opd_step.WORK.completions, opd_step.WORK.new_tokens) == (32, 128)
    assert write_model(teacher_of(opd_step.WORK), tmp_path) == 5_247_744


@pytest.mark.parametrize("peer", opd_step.PEERS)
def test_both_sides_take_a_step_of_the_same_work(peer, tmp_path):
    if not (rl_step.ROOT / ".peers" / "trl" / "bin" / "python").exists():
        pytest.skip("needs .peers/trl; run `make peers`")
    out = opd_step.against(peer, rl_step.peer_python("trl"), TOY, pairs=1)
    assert list(out)[:2] == ["speedup", "memory_ratio"]
    assert (out["parameters"], out["teacher_parameters"], out["pairs"]) == (919_424, 5_247_744, 1)
    assert 0 < out["generation_s"]["trl"] < out["seconds"]["trl"]
    assert out["trl"]["trl"] == "1.16.0"


def test_the_headline_is_against_the_faster_and_the_smaller(monkeypatch, tmp_path):
    found = {"distillation": {"speedup": 3.0, "memory_ratio": 0.5}, "gkd": {"speedup": 4.0, "memory_ratio": 0.75}}
    monkeypatch.setattr(opd_step, "against", lambda peer, *_: {**found[peer], "trl": {}})
    monkeypatch.setattr(rl_step, "peer_python", lambda name: tmp_path)
    out = opd_step.measure(TOY)
    assert (out["speedup"], out["memory_ratio"]) == (3.0, 0.75)
