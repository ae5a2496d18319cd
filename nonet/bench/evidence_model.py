"""Evidence of the model: laws and kernels, parity with independent implementations, quantisation, balance, training,
context. Commands a reader can run alone.
"""

from __future__ import annotations

import sys
from typing import Any

from nonet.bench.evidence import Line, bench, run, tests

LAWS = ("test_law01", "test_law02", "test_law14", "test_law15", "test_law16")


def laws() -> tuple[dict[str, Any], bool]:
    return tests("tests/laws", "tests/ops", "-k", " or ".join((*LAWS, "kda")))


def codes() -> tuple[dict[str, Any], bool]:
    figures, ok = tests("tests/quant", "-rs")
    gaps, measured = bench("qat", ("ptq_gap", "qat_gap", "loss", "gaps"), lambda f: f["qat_gap"] < f["ptq_gap"])()
    return figures | gaps, ok and measured


KDA = {
    **{"fwd_vs_fla": 25, "fwd_vs_hf": 80, "fwd_of_sgemm": 0.8, "fwdbwd_vs_autograd": 4},
    **{"decode_vs_torch_b1": 5, "decode_vs_torch_b64": 5, "torch_fwd_vs_fla": 5},
}


def k3_size() -> tuple[dict[str, Any], bool]:
    done = run(sys.executable, "-m", "nonet.cli", "check", "recipes/k3.toml")
    line = next((line for line in done.stdout.splitlines() if line.startswith("model:")), done.stderr.strip())
    return {"nonet check recipes/k3.toml": line}, "2.78T total" in line and "104.2B active" in line


LINES = (
    Line("0", "nonet check recipes/k3.toml: 2.78T total, 104.2B active", k3_size),
    Line("1", "laws 1, 2, 14, 15, 16 and the matrix of KDA cases", laws),
    Line("2", "KDA kernels against fla, transformers, sgemm and torch", bench("kda", (*KDA,), lambda f: all(
        f[k] >= least for k, least in KDA.items()))),
    Line("3", "parity: K3 in llama.cpp 2e-4, Kimi-Linear in transformers 1e-4", bench(
        "parity", ("k3_vs_llamacpp", "kimi_linear_vs_hf"),
        lambda f: f["k3_vs_llamacpp"] <= 2e-4 and f["kimi_linear_vs_hf"] <= 1e-4)),
    Line("4", "MX codes equal torchao and microxcaling; quantised after training against trained on the grid", codes),
    Line("5", "balance: MaxVio at most 0.3 by step 5", bench(
        "balance", ("maxvio_step5",), lambda f: all(v <= 0.3 for v in f["maxvio_step5"].values()))),
    Line("6", "pretraining against transformers' Kimi-Linear: at least 3x", bench(
        "pretrain", ("vs_hf_kimi_linear",), lambda f: f["vs_hf_kimi_linear"] >= 3)),
    Line("7", "the NoPE experiment", bench(
        "context", ("claim", "verdict", "multi_key"), lambda f: f["cells_done"] == f["cells"])),
)  # fmt: skip
