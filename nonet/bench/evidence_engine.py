"""Evidence of the engine: a cache that never lies, decoding beside its peers, a server under mixed load. Commands a
reader can run alone.
"""

from __future__ import annotations

import sys
from typing import Any

from nonet.bench.evidence import Line, bench, run, tests

LAWS = ("test_law02", "test_law03", "test_law04", "test_law08", "test_law18")
DECODE = {"k3_b1_vs_hf": 5.0, "k3_b64_vs_hf": 3.4, "smollm2_b1_vs_vllm": 1.5, "smollm2_b16_vs_vllm": 1.0}


def laws() -> tuple[dict[str, Any], bool]:
    return tests("tests/laws", "-k", " or ".join(LAWS))


def complaints() -> tuple[dict[str, Any], bool]:
    return tests("tests/engine/test_cache_complaints.py")


def bound() -> tuple[dict[str, Any], bool]:
    """What `nonet check` says of the fast mode's distance from the deterministic one."""
    done = run(sys.executable, "-m", "nonet.cli", "check", "recipes/nano-rl.toml")
    said = [line for line in done.stdout.splitlines() if line.startswith("engine: fast mode")]
    return {"nonet check": said[-1].strip() if said else done.stderr.strip()}, bool(said)


LINES = (
    Line("1", "laws 2, 3, 4, 8, 18 over random programs", laws),
    Line("1b", "the fast mode's bound, printed by nonet check", bound),
    Line("2", "every complaint of hybrid prefix caches is a test", complaints),
    Line("3", "prefix cache: hit rates at 48 snapshots", bench(
        "prefix", ("hit_48", "hit_48_retries", "ttft_vs_off", "ttft_vs_off_retries"),
        lambda f: f["hit_48"] >= 0.85 and f["hit_48_retries"] >= 0.80)),
    Line("4", "decode beside transformers, vLLM, llama.cpp", bench(
        "decode", (*DECODE, "k3_b1_vs_llamacpp", "smollm2_b16_a32_vs_vllm",
                   "smollm2_b1_vs_llamacpp", "two_threads", "quality"),
        lambda f: all(f.get(k, 0) >= least for k, least in DECODE.items()),
        "--only", "hf,llamacpp,vllm,vllm_a32,llamacpp_smollm2,llamacpp_smollm2_mxfp4,quality")),
    Line("5", "MLA decode against re-expansion at 8k and 64k: 15x", bench(
        "decode", ("mla_8k_vs_hf", "mla_64k_vs_hf"),
        lambda f: min(f["mla_8k_vs_hf"], f["mla_64k_vs_hf"]) >= 15, "--only", "mla")),
    Line("6", "1,000 mixed requests: all answered, nothing left", bench(
        "serve", ("requests", "unanswered", "left", "rss_growth_mb"),
        lambda f: f["unanswered"] == 0 and f["left"] == 0)),
)  # fmt: skip
