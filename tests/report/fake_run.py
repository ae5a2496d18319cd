"""A made-up run directory with every kind of event the report reads; seeded, no model behind it.

Usage to look at a page: `python tests/report/fake_run.py DIRECTORY` writes the run and its report.html.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

DOMAINS = ("agents", "coding", "general")
T0 = 1_760_000_000.0
EVIL = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'`&amp;",
    "\u0000\u0007\u001b[31m",
    "\u202egnp.exe",
    "\ud800",
    "\u2028",
    "]]>",
    "",
    "\n\n\t",
    "𝔘é漢",
]


def write_run(path: Path, *, cold: int = 90, steps: int = 120, per_step: int = 24, evil: bool = False) -> Path:
    """Write a complete run; returns its directory."""
    rng = random.Random(7)
    path.mkdir(parents=True, exist_ok=True)
    (path / "resolved.json").write_text(json.dumps(_settings()))
    events = [*_cold(rng, cold), *_evals(rng, "eval-cold", 0.0), *_rl(rng, steps), *_evals(rng, "eval-rl", 0.2)]
    events += [*_gains(rng), *_kept(rng), *_draft(), *_tail(evil)]
    lines = [json.dumps({"t": T0 + 3.1 * i, **e}) + "\n" for i, e in enumerate(events)]
    (path / "events.jsonl").write_text("".join(lines))
    folder = path / "trajectories"
    folder.mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        records = [_trajectory(rng, step, steps, i, evil) for i in range(per_step)]
        _write(folder / f"step-{step:06d}.jsonl", records)
    for name in ("eval-cold", "eval-rl"):
        records = [_trajectory(rng, 0 if name == "eval-cold" else steps, steps, i, evil) for i in range(30)]
        _write(folder / f"{name}.jsonl", [{**r, "step": None} for r in records])
    return path


def _write(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))


def _settings() -> dict[str, Any]:
    return {
        "seed": 17,
        "out": "/home/someone/runs/first",
        "model": {"layers": 6, "hidden": 192, "heads": 6, "experts": 16, "active_experts": 4, "vocab_size": 2048},
        "lm": {"steps": 900, "batch": 64, "lr": 0.003, "warmup": 50},
        "rl": {"steps": 120, "samples": 8, "fraction": 0.6, "active": 384, "lr": 1e-4, "window": [0.5, 2.0]},
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        "tasks": {"sources": ["general.add", "agents.move", "coding.fix"], "heldout": 1000},
    }


def _stage(name: str, status: str, **more: float) -> dict[str, Any]:
    return {"kind": "stage", "name": name, "status": status, **more}


def _cold(rng: random.Random, points: int) -> list[dict[str, Any]]:
    out = [_stage("tokenizer", "start"), _stage("tokenizer", "done", seconds=12.31), _stage("cold", "start")]
    for i in range(1, points + 1):
        loss = 0.9 + 5.8 * math.exp(-i / 9) + rng.gauss(0, 0.03)
        row: dict[str, Any] = {"stage": "cold", "step": 10 * i, "steps": 10 * points, "loss": loss}
        row |= {"mtp_loss": loss * 1.12 + 0.4, "tokens": i * 163840, "seconds": 4.1 * i}
        out.append({"kind": "lm_step", **row, "lr": 0.003 * min(1, i / 5) * (1 - i / (points * 1.1))})
    return [*out, _stage("cold", "done", seconds=372.5)]


def _evals(rng: random.Random, stage: str, lift: float) -> list[dict[str, Any]]:
    out = [_stage(stage, "start")]
    for k, domain in enumerate(DOMAINS):
        for mode in ("sampled", "greedy"):
            mean = 0.3 + 0.12 * k + lift + (0.05 if mode == "greedy" else 0) + rng.gauss(0, 0.01)
            row = {"stage": stage, "domain": domain, "source": domain, "mode": mode, "n": 1000, "reward": mean}
            out.append({"kind": "eval", **row, "low": mean - 0.03, "high": mean + 0.03, "length": 22 + 30 * k})
    return [*out, _stage(stage, "done", seconds=41.0)]


def _gains(rng: random.Random) -> list[dict[str, Any]]:
    out = []
    for k, domain in enumerate(DOMAINS):
        for mode in ("sampled", "greedy"):
            gain = (0.2, 0.1, 0.01)[k] + rng.gauss(0, 0.01)
            row = {"domain": domain, "mode": mode, "n": 1000, "gain": gain}
            out.append({"kind": "gain", **row, "low": gain - 0.035, "high": gain + 0.035})
    return out


def _draft() -> list[dict[str, Any]]:
    out = [_stage("draft", "start")]
    for mode in ("sampled", "greedy"):
        for k, domain in enumerate(("all", *DOMAINS)):
            lengths = {"untouched": 2.5 + 0.1 * k, "tuned": 3.8 + 0.1 * k}
            row: dict[str, Any] = {"stage": "draft", "mode": mode, "tokens": 7, "domain": domain}
            for name, length in lengths.items():
                positions = [0.9 * (1 - 1 / length) ** i for i in range(7)]
                row[name] = {"requests": 100, "looping": 0.0, "length": length, "low": length - 0.2}
                row[name] |= {"high": length + 0.2, "steps": 900, "positions": positions}
            out.append({"kind": "draft_measured", **row, "factor": {"ratio": 1.52, "low": 1.4, "high": 1.63}})
    out.append(_stage("draft", "done", seconds=21.0))
    reward = {"n": 50, "reward": 0.62, "low": 0.5, "high": 0.74, "seconds": 3.0, "tokens": 900}
    for mode in ("sampled", "greedy"):
        drafted = {**reward, "seconds": 2.0, "asked": 800, "stood": 520}
        out.append({"kind": "served", "domain": "general", "mode": mode, "alone": reward, "drafted": drafted})
        out[-1] |= {"speedup": 1.5}
    return [*out, _stage("serve", "done", seconds=9.0)]


def _rl(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    out = [_stage("rl", "start")]
    for step in range(1, steps + 1):
        done = step / steps
        rewards = {f"reward_{d}": 0.3 + 0.1 * k + 0.25 * done + rng.gauss(0, 0.06) for k, d in enumerate(DOMAINS)}
        row: dict[str, Any] = {"step": step, "version": step, "reward": sum(rewards.values()) / 3, **rewards}
        row |= {"groups": 41, "dead_groups": int(10 + 12 * done + rng.random() * 5), "active": 384, "finished": 310}
        row |= {"parked": int(60 + 20 * rng.random()), "tokens": 12345, "length": 22 + 18 * done + rng.gauss(0, 2)}
        row |= {"entropy": 0.9 * math.exp(-2 * done) + rng.gauss(0, 0.02), "kl": rng.gauss(2e-4, 2e-4)}
        row |= {"ratio_min": 0.8 - 0.6 * rng.random() ** 3, "ratio_max": 1.2 + 3 * rng.random() ** 6}
        row |= {"masked": 0.002 * rng.random() ** 2, "stale": 0.08 + 0.03 * rng.random(), "loss": rng.gauss(0, 0.01)}
        row |= {"grad_norm": 0.5 + 0.6 * rng.random() ** 4, "lr": 1e-4, "rollout_s": 1.9 + rng.random()}
        row |= {"ages": _ages(rng), "effort": _effort(rng, done), **_bias(rng)}
        if 60 < step < 70:
            row["effort_warnings"] = ["coding:low: every attempt was over budget in 7 of 9 groups; anneal more slowly"]
        out.append({"kind": "rl_step", **row, "update_s": 1.2 + 0.2 * rng.random()})
        out.append({"kind": "trained", "step": step, "groups": list(range(step * 4, step * 4 + 4))})
    return [*out, _stage("rl", "done", seconds=411.2)]


def _ages(rng: random.Random) -> list[dict[str, Any]]:
    sizes = [9000, 2400, 700, 210, 40]
    pulls = [n * (1 - 0.12 * age) * (0.9 + 0.2 * rng.random()) for age, n in enumerate(sizes)]
    out = []
    for age, n in enumerate(sizes):
        wide = 0.04 + 0.09 * age * (0.8 + 0.4 * rng.random())
        row = {"age": age, "tokens": n, "ratio_p05": 1 / (1 + wide), "ratio_p50": 1 - wide / 60, "ratio_p95": 1 + wide}
        out.append({**row, "clipped": 0.001 + 0.006 * age, "grad_share": pulls[age] / sum(pulls)})
    return out


def _effort(rng: random.Random, done: float) -> list[dict[str, Any]]:
    out = []
    for k, domain in enumerate(DOMAINS):
        for level, base, last in (("low", 6, 0.35), ("high", 16, 0.75), ("max", 34, None)):
            m = None if last is None else 2 * (last / 2) ** min(1, 1.4 * done)
            tokens = (base + 5 * k) * (1 + 0.2 * done) + rng.gauss(0, 1)
            limit = None if m is None else m * (30 + 5 * k)
            tokens = tokens if limit is None else min(tokens, 0.9 * limit + rng.gauss(0, 0.6))
            over = 0.0 if limit is None else max(0.0, 0.1 * math.sin(3 * done) + rng.gauss(0, 0.02))
            row = {"domain": domain, "effort": level, "attempts": 40, "groups": 5, "tokens": tokens, "over": over}
            row |= {
                "task_reward": 0.3 + 0.01 * base + 0.2 * done + rng.gauss(0, 0.05),
                "trapped": over * over,
                "dead": 0.25 + 0.2 * done + rng.gauss(0, 0.04),
            }
            out.append({**row, "reward": 0.2, "multiplier": m, "limit": limit})
    return out


def _bias(rng: random.Random) -> dict[str, Any]:
    lengths = {str(1 << i): n for i, n in enumerate((4, 9, 30, 80, 120, 70, 22))}
    domains = dict.fromkeys(DOMAINS, 100)
    sampled = {"length": lengths, "age": {"0": 250, "1": 60, "2": 12}, "domain": domains}
    cut = {k: {name: int(n * rng.uniform(0.5, 0.7)) for name, n in table.items()} for k, table in sampled.items()}
    cut["length"]["64"] = 6
    return {"sampled": sampled, "trained": cut}


def _kept(rng: random.Random) -> list[dict[str, Any]]:
    """Nine experts and the model that they were merged into."""
    out: list[dict[str, Any]] = []
    shares = []
    for k, domain in enumerate(DOMAINS):
        tokens = {}
        for i, level in enumerate(("low", "high", "max")):
            cold, expert = 0.2 + 0.1 * i, 0.4 + 0.12 * i + 0.03 * k
            share = 0.85 + 0.2 * rng.random()
            merged, at = cold + share * (expert - cold), {"domain": domain, "effort": level, "mode": "sampled"}
            weak = (k, i) == (1, 0)
            row = {"n": 1000, "cold": cold, "expert": expert, "merged": merged, "retention": share}
            row |= {
                "low": share - 0.15,
                "high": share + 0.17,
                "gain": expert - cold,
                "gain_low": -0.01 if weak else 0.1,
            }
            out.append({"kind": "retention", **at, **row, "gain_high": 0.4})
            for name, reward in (("cold", cold), ("expert", expert), ("merged", merged)):
                spent = (8, 19, 41)[i] + 3 * k + rng.random()
                cell = {"model": name, **at, "n": 1000, "failed": 0, "reward": reward, "tokens": spent}
                out.append({"kind": "cell", **cell, "low": reward - 0.03, "high": reward + 0.03})
                tokens[level] = [spent, spent - 0.4, spent + 0.4]
            shares.append(share)
        row = {
            "domain": domain,
            "model": "merged",
            "mode": "sampled",
            "tokens": tokens,
            "separated": domain != "coding",
        }
        out.append({"kind": "separation", **row, "share": tokens["low"][0] / tokens["max"][0], "ordered": True})
    mean = sum(shares) / len(shares)
    row = {"domain": "all", "effort": "", "mode": "sampled", "retention": mean, "low": mean - 0.05, "high": mean + 0.06}
    return [*out, {"kind": "retention", **row}]


def _tail(evil: bool) -> list[dict[str, Any]]:
    answer = "<think>3 and 4 make 7</think>\n7" if not evil else "".join(EVIL)
    return [
        _stage("sample", "start"),
        {"kind": "sample", "prompt": "What is 3 + 4?", "text": answer},
        {"kind": "sample", "prompt": "Move the box from a to c.", "text": '<tool_call>{"name": "move"}</tool_call>'},
        {"kind": "note", "text": "resumed from /home/someone/runs/first/checkpoints/rl-60 after an interruption"},
        *([{"kind": "note", "text": "".join(EVIL)}] if evil else []),
        _stage("sample", "done", seconds=0.84),
        _stage("report", "start"),
    ]


_PROMPT = ["<|user|>", "\n", "What", " is", " 3", " +", " 4", "?", "\n"]
_WORDS = {
    "general": ["add", " 4", " and", " 7", " gives", " 11", "\n", "answer", ": ", "11"],
    "agents": ["<tool_call>", '{"name"', ": ", '"move"', ", ", '"to"', ": ", '"c"', "}", "</tool_call>", "\n"],
    "coding": ["def", " f", "(", "x", "):", "\n", "\t", "return", " x", " +", " 1", "\n"],
}


def _trajectory(rng: random.Random, step: int, steps: int, i: int, evil: bool) -> dict[str, Any]:
    domain = DOMAINS[i % 3]
    words = _WORDS[domain] + (EVIL if evil else [])
    versions = min(step, 1 + (rng.random() < 0.25) + (rng.random() < 0.1) + (5 if rng.random() < 0.01 else 0)) or 1
    segments: list[dict[str, Any]] = [_segment("prompt", 0, _PROMPT, [])]
    for k in range(versions):
        count = max(1, int(rng.lognormvariate(2.3 + 0.6 * step / steps, 0.6)))
        pieces = [words[(rng.randrange(len(words)) + j) % len(words)] for j in range(count)]
        version = step - versions + 1 + k
        segments.append(_segment("policy", version, pieces, [-rng.expovariate(2.0) for _ in pieces]))
        if domain == "agents":
            segments.append(_segment("tool", 0, ["<|tool|>", "ok", ": ", "moved", "\n"], []))
    advantage, taught = rng.choice([-0.5, 0.25, 0.5]), i % 5 == 0
    trained = rng.random() < 0.7
    for s in segments:
        if s["author"] == "policy":
            s |= {"advantage": [advantage] * len(s["pieces"])} if trained else {}
            s |= {"teacher_log_ratio": [rng.gauss(0, 1) for _ in s["pieces"]]} if taught else {}
    reward = float(rng.random() < 0.3 + 0.4 * step / steps) if domain != "coding" else rng.choice([0.0, 0.25, 0.5, 1.0])
    return {
        "id": f"group={step * 8 + i // 4}/sample={i % 4}",
        "task_id": f"{domain}.{'</script>' if evil else 'task'}/train/{step * 8 + i // 4}",
        "group": step * 8 + i // 4,
        "sample": i % 4,
        "domain": domain,
        "effort": ("low", "high", "max")[i % 7 % 3],
        "reward": reward if i % 11 else -1.0,
        "rewards": {"task": reward} if i % 11 else {"over_budget": -1.0},
        "trained": trained,
        "status": "done",
        "stop_reason": "stop",
        "harness": "3f9ac01b22d4e871",
        "step": step,
        "segments": segments,
    }


def _segment(author: str, version: int, pieces: list[str], logprobs: list[float]) -> dict[str, Any]:
    return {"author": author, "version": version, "pieces": pieces, "logprobs": logprobs}


if __name__ == "__main__":
    from nonet.report import write

    print(write(write_run(Path(sys.argv[1]), evil="--evil" in sys.argv)))
