"""`nonet bench overlap`: what the figures are made of, and that all sides compute the same in small."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from nonet import native
from nonet.bench import overlap, overlap_inputs, overlap_worker
from nonet.ops.overlap import overlap_definition
from nonet.types import UserError

PYTHON = overlap.ROOT / ".peers" / "speculators" / "bin" / "python"


def test_without_the_peer_venv_one_sentence_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(overlap, "ROOT", tmp_path)
    with pytest.raises(UserError) as caught:
        overlap.measure()
    assert str(caught.value) == "bench overlap: needs the speculators venv; run `make peers`"


def test_the_controller_knows_cases_and_forms_without_torch():
    assert overlap.PAIRS.keys() == overlap_inputs.CASES.keys()
    assert set(overlap.OURS) == overlap_worker.FORMS.keys()


def test_headline_keys_are_native_over_naive_by_medians_of_turns():
    memory = {"naive": 1000.0 * 2**20, "native": 20.0 * 2**20, "torch": 2.0**20, "speculators": 500.0 * 2**20}
    row = {"naive": 10.0, "native": 8.0, "torch": 20.0, "speculators": 9.0}
    out = overlap.figures(memory, [row, {**row, "naive": 20.0, "native": 8.0}, {**row, "native": 80.0}])
    assert list(out)[:2] == ["extra_memory_of_naive", "time_of_naive"]
    assert (out["extra_memory_of_naive"], out["time_of_naive"]) == (0.02, 0.8)
    assert out["speculators_of_naive"] == {"extra_memory": 0.5, "time": 0.9}
    assert out["extra_mib"]["naive"] == 1000 and out["cpu_s"]["native"] == 8.0 and out["turns"] == 3


def test_forms_that_computed_something_else_void_the_comparison():
    overlap.check({"naive": [1.0, 2.0], "native": [1.00001, 2.0]})
    with pytest.raises(AssertionError, match=r"native: differs from the naive form by 5\.0e-02, needs below 0\.0001"):
        overlap.check({"naive": [1.0, 2.0], "native": [1.0, 2.1]})


@pytest.mark.parametrize("kept", [900, 300])
def test_our_forms_agree_on_the_benchs_inputs(kept):
    digests = {
        name: overlap_inputs.passed(loss, overlap_inputs.made(kept, 24, 900))[1]
        for name, loss in overlap_worker.FORMS.items()
    }
    overlap.check(digests)


def in_a_fresh_process(form: str) -> int:
    """Extra bytes of one pass: what a test before this one freed stays resident here, and a pass would reuse it."""
    code = "from nonet.bench import overlap_inputs as i, overlap_worker as w; import torch; torch.set_num_threads(1)"
    code += f"; print(i.extra_bytes(w.FORMS['{form}'], i.made(40_000, 256, 40_000)))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
def test_memory_is_counted_beyond_inputs_and_gradients():
    """The naive form holds three matrices of [T, V] and more at its peak, the native form none."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of this process cannot be reset")
    matrix = 256 * 40_000 * 4
    assert in_a_fresh_process("naive") > 3 * matrix
    assert in_a_fresh_process("native") < matrix / 2


def test_speculators_computes_the_same_loss_in_a_whole_vocabulary():
    if not PYTHON.exists():
        pytest.skip("needs .peers/speculators; run `make peers`")
    code = "import sys; sys.path.insert(0, 'peers'); import torch, speculators_overlap as s; gen = torch.Generator()"
    code += "; f = s.eager('neg_log_acceptance_loss'); z = torch.randn(2, 1, 6, 50, generator=gen.manual_seed(1))"
    code += "; print(*f(z[0], z[1])[0].tolist())"
    env = {**os.environ, "PYTHONPATH": str(overlap.ROOT)}
    out = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, cwd=overlap.ROOT, env=env)
    assert out.returncode == 0, out.stderr
    z = torch.randn(2, 1, 6, 50, generator=torch.Generator().manual_seed(1))
    ours = overlap_definition(z[0, 0], z[1, 0]).rows_T
    torch.testing.assert_close(torch.tensor([float(x) for x in out.stdout.split()]), ours)
