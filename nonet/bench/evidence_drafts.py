"""Evidence of the drafts: laws, the loss, the nano draft, SmolLM2's, other engines. Commands a reader can run alone.

The SmolLM2 draft is trained by `nonet draft recipes/smollm2-draft.toml` (an hour; it continues where it was stopped).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nonet.bench.evidence import Line, bench, run, tests
from nonet.run import Run

RECIPE, TARGET, OUT = "recipes/smollm2-draft.toml", "models/smollm2", Path("runs/draft-smollm2-draft")
LIMIT_S = 3600.0
TRAINED = ("answers", "features", "training")
LOSS = ("tests/ops/test_overlap.py", "tests/ops/test_overlap_forms.py")
ROOMS = "draft or export or lint or store or unroll or speculation or windows"


def laws() -> tuple[dict[str, Any], bool]:
    return tests("tests/laws", "-k", "test_law05 or test_law06 or test_law07")


def loss() -> tuple[dict[str, Any], bool]:
    return tests(*LOSS)


def trained() -> tuple[dict[str, Any], bool]:
    """The recipe from nothing, or what it left: minutes of each part that makes the draft."""
    done = run(sys.executable, "-m", "nonet.cli", "draft", RECIPE)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}, False
    took = [(e["part"], e["seconds"]) for e in Run(OUT).events("took") if e["part"] in TRAINED]
    total = sum(seconds for _, seconds in took)
    measured = json.loads((OUT / "measured.json").read_text())
    lengths = {mode: round(m["length"], 3) for mode, m in measured["modes"].items()}
    return {"minutes": {part: round(s / 60, 1) for part, s in took} | {"total": round(total / 60, 1)},
            "acceptance_length": lengths}, total <= LIMIT_S  # fmt: skip


def other_engine(module: str, same: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """One of the comparisons on 20 prompts; same: two figures that must be equal."""
    done = run(sys.executable, "-m", f"nonet.bench.{module}", TARGET, str(OUT / "draft"))
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}, False
    found = json.loads(done.stdout.splitlines()[-1])
    return found, found[same[0]] == found[same[1]]


def vllm() -> tuple[dict[str, Any], bool]:
    found, alike = other_engine("draft_vllm", ("ours", "theirs"))
    return found, alike or (bool(found.get("parted")) and all(p["gap"] < 1e-3 for p in found["parted"]))


def llamacpp() -> tuple[dict[str, Any], bool]:
    return other_engine("draft_llamacpp", ("ours", "theirs"))


def inputs() -> tuple[dict[str, Any], bool]:
    return tests("tests/draft", "tests/engine", "-k", ROOMS)


LINES = (
    Line("1", "laws 5, 6, 7: lossless, exact at the start, the loss is the acceptance", laws),
    Line("2", "the loss: gradients in float64, the five defect inputs", loss),
    Line("2b", "the loss: extra memory at most 1/50, time at most 1.2 of the naive form", bench(
        "overlap", ("extra_memory_of_naive", "time_of_naive", "speculators_of_naive", "pruned"),
        lambda f: f["extra_memory_of_naive"] <= 1 / 50 and f["time_of_naive"] <= 1.2)),
    Line("3", "nano: the tuned draft against the untouched MTP layer, three seeds: +25%", bench(
        "draft_nano", ("gain", "gain_interval", "lengths", "factors", "corpus"),
        lambda f: f["gain_interval"][0] >= 1.25)),
    Line("4", "SmolLM2: the recipe within an hour", trained),
    Line("4b", "SmolLM2: acceptance at least 2.0 greedy, 1.3 times as fast, the same answers", bench(
        "draft", ("acceptance_t0", "acceptance_t0_interval", "acceptance_t1", "speedup_b1", "lossless", "looping",
                  "lookup_acceptance_t0", "lookup_speedup_b1", "cost"),
        lambda f: f["acceptance_t0"] >= 2.0 and f["speedup_b1"] >= 1.3 and f["lossless"] == 1.0
        and f["speedup_b1"] > f["lookup_speedup_b1"])),
    Line("5", "the exported draft in vLLM: accepted counts by position", vllm),
    Line("5b", "the exported draft in llama.cpp: accepted counts", llamacpp),
    Line("6", "one sample overfitted: K + 1 within 2%", lambda: tests("tests/draft", "-k", "by_heart")),
    Line("7", "every failing input of loss, masks, vocabulary, ids, resume, export is a test", inputs),
)  # fmt: skip
