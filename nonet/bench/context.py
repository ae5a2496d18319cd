"""Who needs positions: NoPE and RoPE hybrids trained at 64 tokens, extended to 1024, probed before and after.

Same data, steps and sizes: hybrid with NoPE MLA; hybrid with RoPE in its MLA layers; the same with the base retuned at
each extension; MLA without positions in all layers; and two hybrids from which a carrier of order is taken (KDA's
decay, its convolution). Recall of pairs hidden in text and loss by position, from the training length to 16 times it;
what shuffling earlier text does to the loss. Three seeds; a variant that does not recall 90% at its training length
gets no verdict. Each (variant, seed, stage) is kept under runs/context when it is done, and a run that was stopped
continues; start the command twice to use two cores.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from nonet.bench import context_plot
from nonet.bench.context_probe import probe
from nonet.bench.context_task import RecallText
from nonet.lm import LMConfig, train
from nonet.model import Model, ModelConfig, Rope, hf
from nonet.model.init import initialise
from nonet.run import Run, write_atomic

FOLDER = Path("runs/context")
SEEDS = (0, 1, 2)
LENGTHS = (64, 128, 256, 512, 1024)
ENOUGH = 0.9
BASE = 10_000.0
SHAPE: dict[str, Any] = dict(
    d_model=96, layers=4, heads=3, d_ff=256, kda_head_dim=32, decay_rank=16, q_lora_rank=48, kv_lora_rank=32,
    qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "nope": {},
    "rope": {"mla_rope": Rope(theta=BASE)},
    "rope_retuned": {"mla_rope": Rope(theta=BASE)},
    "all_attention_nope": {"mixers": ("mla",) * 4},
    "no_decay": {"decay": "none"},
    "no_convolution": {"conv_kernel": 1},
}
SAME_START = {"rope_retuned": "rope"}  # trained alike until the first extension: that stage is shared


@dataclass(frozen=True)
class Stage:
    context: int
    steps: int
    batch: int
    lr: float


STAGES = (Stage(64, 700, 64, 6e-3), Stage(256, 60, 32, 1e-3), Stage(1024, 30, 8, 1e-3))


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    task = data()
    for seed in SEEDS:
        for variant in VARIANTS:
            with claimed(f"{SAME_START.get(variant, variant)}-{seed}") as mine:
                if mine:
                    run_cell(task, variant, seed)
    return summary()


def data() -> RecallText:
    """Made by one process, waited for by another."""
    while True:
        with claimed("data") as mine:
            if mine:
                return RecallText.made(FOLDER / "data")
        time.sleep(1.0)


# ------------------------------------------------------------------------------------ one cell


def run_cell(task: RecallText, variant: str, seed: int) -> None:
    """All stages of a variant under a seed, each skipped when its result exists."""
    model: Model | None = None
    for i, stage in enumerate(STAGES):
        result = result_file(variant, seed, i)
        weights = FOLDER / "models" / result.stem
        if i == 0 and variant in SAME_START:
            share(SAME_START[variant], variant, seed, task)
        if result.exists():
            model = hf.load(weights)
            continue
        model = start(task, variant, seed) if model is None else model
        found: dict[str, Any] = {"parameters": model.parameter_count()}
        if i and variant == "rope_retuned":
            model = retuned(model, stage.context / STAGES[i - 1].context)
            found["before"] = probe(model, task, LENGTHS)
        config = LMConfig(steps=stage.steps, batch=stage.batch, lr=stage.lr, warmup=stage.steps // 20, block=1)
        run = Run(FOLDER / "runs" / f"{variant}-{seed}")
        train(model, lambda first, n, s=stage: task.training_rows(s.context, seed, first, n), config, run, f"stage{i}")
        found["after"] = probe(model, task, LENGTHS)
        hf.save(model, weights)
        result.parent.mkdir(exist_ok=True)
        write_atomic(result, json.dumps(found, indent=1))


def result_file(variant: str, seed: int, stage: int) -> Path:
    return FOLDER / "results" / f"{variant}-{seed}-{STAGES[stage].context}.json"


def share(source: str, variant: str, seed: int, task: RecallText) -> None:
    """The first stage of `variant` is that of `source`; made there if it does not exist yet."""
    theirs, mine = result_file(source, seed, 0), result_file(variant, seed, 0)
    if mine.exists():
        return
    if not theirs.exists():
        run_cell(task, source, seed)
    hf.save(hf.load(FOLDER / "models" / theirs.stem), FOLDER / "models" / mine.stem)
    write_atomic(mine, theirs.read_text())


def start(task: RecallText, variant: str, seed: int) -> Model:
    return initialise(Model(ModelConfig(**{**SHAPE, **VARIANTS[variant]}, vocab_size=task.vocab_size)), seed)


def retuned(model: Model, factor: float) -> Model:
    """The same weights with the rotary base raised so that the slowest pair turns as far in the longer context as it
    did in the shorter: base * factor ** (d / (d - 2)).
    """
    rope, d = model.config.mla_rope, model.config.qk_rope_head_dim
    assert rope is not None
    theta = rope.theta * factor ** (d / (d - 2))
    other = Model(model.config.model_copy(update={"mla_rope": rope.model_copy(update={"theta": theta})}))
    other.load_state_dict(model.state_dict())
    return other


@contextmanager
def claimed(name: str) -> Iterator[bool]:
    """True for the one process that works on `name`; waits for nobody. A claim of a process that died is taken over."""
    file, own = FOLDER / f".{name}.claim", FOLDER / f".{name}.{os.getpid()}"
    if file.exists() and not psutil.pid_exists(int(file.read_text())):
        file.unlink(missing_ok=True)
    own.write_text(str(os.getpid()))
    try:
        os.link(own, file)  # whole or not at all
    except FileExistsError:
        yield False
        return
    finally:
        own.unlink()
    try:
        yield True
    finally:
        file.unlink()


# ---------------------------------------------------------------------------------- together


def summary() -> dict[str, Any]:
    """What is done so far: verdicts, then recall, loss and shuffling by variant and stage (medians over seeds)."""
    found = results()
    out: dict[str, Any] = {"verdict": {}, "cells_done": sum(map(len, found.values()))}
    out["cells"] = len(VARIANTS) * len(STAGES) * len(SEEDS)
    for (variant, stage), cells in found.items():
        if stage == 0:
            recall = median(c["after"]["multi_key"][str(STAGES[0].context)] for c in cells)
            words = "recalls" if recall >= ENOUGH else "no verdict: recalls"
            out["verdict"][variant] = f"{words} {recall:.2f} at {STAGES[0].context} tokens, {len(cells)} seeds"
    for key in ("multi_key", "needle", "position_loss", "shuffle"):
        out[key] = {
            f"{variant}, {when} {STAGES[stage].context}": across(cells, when, key)
            for (variant, stage), cells in found.items()
            for when in ("before", "after")
            if all(when in c for c in cells)
        }
    out["parameters"] = {variant: cells[0]["parameters"] for (variant, _), cells in found.items()}
    out["plot"] = str(context_plot.write(out["multi_key"], [s.context for s in STAGES], FOLDER / "recall.svg"))
    return out


def results() -> dict[tuple[str, int], list[dict[str, Any]]]:
    """(variant, stage) -> its results, one a seed; absent where none is done."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for variant in VARIANTS:
        for stage in range(len(STAGES)):
            files = [f for f in (result_file(variant, seed, stage) for seed in SEEDS) if f.exists()]
            if files:
                found[variant, stage] = [json.loads(f.read_text()) for f in files]
    return found


def across(cells: list[dict[str, Any]], when: str, key: str) -> dict[str, float]:
    return {name: round(median(c[when][key][name] for c in cells), 4) for name in cells[0][when][key]}
