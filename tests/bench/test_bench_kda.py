"""`nonet bench kda`: what the figures are made of, and one turn of either side."""

from __future__ import annotations

import sys

import pytest

from nonet import native
from nonet.bench import kda, kda_inputs, kda_worker
from nonet.types import UserError


def test_without_the_peer_venv_one_sentence_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(kda, "ROOT", tmp_path)
    with pytest.raises(UserError) as caught:
        kda.measure()
    assert str(caught.value) == "bench kda: needs the fla venv; run `make peers`"


def test_the_controller_knows_the_shapes_without_torch():
    assert (kda.LENGTHS, kda.HEADS, kda.WIDTH) == (kda_inputs.LENGTHS, kda_inputs.HEADS, kda_inputs.WIDTH)
    assert kda.SQUARE == kda_worker.SQUARE


def test_ratios_are_medians_and_the_smaller_length_counts():
    row = {f"{name}_{T}": 1.0 for name in ("native", "torch", "native_both") for T in kda.LENGTHS}
    row |= {"fla_1024": 30.0, "fla_4096": 40.0, "transformers_1024": 90.0, "transformers_4096": 80.0}
    row |= {f"sgemm_{T}": 1.0 for T in kda.LENGTHS} | {f"torch_both_{T}": 5.0 for T in kda.LENGTHS}
    row |= {"step_native_1": 1.0, "step_torch_1": 6.0, "step_native_64": 1.0, "step_torch_64": 7.0}
    row |= {"step_called_1": 1.5, "step_called_64": 1.0}
    out = kda.figures([row, {**row, "fla_1024": 10.0}, {**row, "fla_1024": 31.0}])
    assert list(out)[:5] == ["fwd_vs_fla", "fwd_vs_hf", "fwd_of_sgemm", "fwdbwd_vs_autograd", "torch_fwd_vs_fla"]
    assert (out["fwd_vs_fla"], out["fwd_vs_hf"], out["fwdbwd_vs_autograd"]) == (30.0, 80.0, 5.0)
    assert (out["decode_vs_torch_b1"], out["decode_vs_torch_b64"]) == (6.0, 7.0)
    assert (out["decode_call_vs_torch_b1"], out["decode_call_vs_torch_b64"]) == (4.0, 7.0)
    assert out["by_length"]["fwd_vs_fla"] == {"1024": 30.0, "4096": 40.0}
    assert out["fwd_of_sgemm"] == pytest.approx(kda.flops(1024) / (2 * 2048**3))
    assert out["tokens_per_cpu_s"]["native_4096"] == 4096


def test_flops_of_a_position_and_head():
    """Three products with a 128 x 128 state, and four triangles of a chunk of 16."""
    assert kda.flops(1) / kda.HEADS == 2 * (3 * 128 * 128 + 4 * 128 * 16 / 2)


def test_sides_that_computed_something_else_void_the_comparison():
    kda.check("fla", {"1024": [1.0, -2.0]}, {"1024": [1.0, -2.000001]})
    with pytest.raises(
        AssertionError, match=r"fla at 1024 positions: differs from ours by 5\.0e-05, needs below 1e-05"
    ):
        kda.check("fla", {"1024": [1.0, -2.0]}, {"1024": [1.0, -2.0001]})


@pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
def test_one_turn_of_ours_fills_every_figure_but_the_peers(monkeypatch):
    monkeypatch.setattr(kda_worker, "LENGTHS", (64,))
    monkeypatch.setattr(kda_worker, "SQUARE", 64)
    monkeypatch.setattr(kda_worker, "STEPS", {1: 2, 64: 1})
    row = kda_worker.Work().figures()
    wanted = {f"{n}_64" for n in ("native", "sgemm", "torch", "transformers", "native_both", "torch_both")}
    assert row.keys() == wanted | {f"step_{n}_{B}" for n in ("native", "called", "torch") for B in (1, 64)}
    assert all(x > 0 for x in row.values())


@pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
def test_transformers_computes_the_same():
    work = kda_worker.Work()
    kda.check("transformers", {"1024": kda_inputs.digest(work.forward(1024))}, {
        "1024": kda_inputs.digest(work.transformers(1024))
    })  # fmt: skip


def test_fla_takes_a_turn():
    python = kda.ROOT / ".peers" / "fla" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs .peers/fla; run `make peers`")
    from nonet.bench.turns import Worker

    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(kda.ROOT)}
    with Worker("fla", [python, kda.ROOT / "peers" / "fla_kda.py"], environment) as them:
        assert them.facts["versions"]["torch"].startswith("2.13.0")
        other = Worker("idle", [sys.executable, "-c", "input()"], {})
        turn = them.step(other)
        other.__exit__()
    assert turn.figures.keys() == {"fla_1024", "fla_4096"}
