"""Who needs positions: NoPE and RoPE hybrids trained at 64 tokens, extended to 1024, probed before and after.

Same data, steps and sizes: hybrid with NoPE MLA; hybrid with RoPE in its MLA layers; the same with the base retuned at
each extension; MLA without positions in all layers; and two hybrids from which a carrier of order is taken (KDA's
decay, its convolution). Recall of pairs hidden in text and loss by position, from the training length to 16 times it;
what shuffling earlier text does to the loss. Three seeds; those that do not recall 90% at their training length are not
judged, and a variant with fewer than two that do gets no verdict. Each (variant, seed, stage) is kept under
runs/context when it is done, and a run that was stopped continues; start the command twice to use two cores.
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
ENOUGH, CLOSE = 0.9, 0.05
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


Cells = dict[tuple[str, int], dict[int, dict[str, Any]]]  # (variant, stage) -> seed -> what was found


def summary() -> dict[str, Any]:
    """What is done so far: verdicts, then recall, loss and shuffling by variant and stage: medians over the seeds that
    recall enough at the training length, over all seeds where none does.
    """
    found = results()
    able = {variant: able_seeds(cells) for (variant, stage), cells in found.items() if stage == 0}
    judged = {key: {s: c for s, c in cells.items() if s in able[key[0]]} or cells for key, cells in found.items()}
    out: dict[str, Any] = {"claim": claim(judged, able), "verdict": {v: verdict(found[v, 0], able[v]) for v in able}}
    for key in ("multi_key", "needle", "position_loss", "shuffle"):
        out[key] = {
            f"{variant}, {when} {STAGES[stage].context}": across(list(cells.values()), when, key)
            for (variant, stage), cells in judged.items()
            for when in ("before", "after")
            if all(when in c for c in cells.values())
        }
    out["parameters"] = {variant: next(iter(cells.values()))["parameters"] for (variant, _), cells in found.items()}
    out["cells_done"], out["cells"] = sum(map(len, found.values())), len(VARIANTS) * len(STAGES) * len(SEEDS)
    out["plot"] = str(context_plot.write(out["multi_key"], [s.context for s in STAGES], FOLDER / "recall.svg"))
    return out


def results() -> Cells:
    """Absent where nothing is done."""
    found: Cells = {}
    for variant in VARIANTS:
        for stage in range(len(STAGES)):
            files = {seed: result_file(variant, seed, stage) for seed in SEEDS}
            if done := {seed: json.loads(f.read_text()) for seed, f in files.items() if f.exists()}:
                found[variant, stage] = done
    return found


def able_seeds(cells: dict[int, dict[str, Any]]) -> set[int]:
    """Seeds that recall enough at the length they were trained at: only they can say what longer texts do."""
    return {seed for seed, c in cells.items() if c["after"]["multi_key"][str(STAGES[0].context)] >= ENOUGH}


def verdict(cells: dict[int, dict[str, Any]], able: set[int]) -> str:
    """Of one variant after the first stage; two seeds at least must be able."""
    recall = [round(c["after"]["multi_key"][str(STAGES[0].context)], 2) for c in cells.values()]
    words = "" if len(able) >= 2 else "no verdict: "
    return f"{words}{len(able)} of {len(cells)} seeds recall {ENOUGH:.0%} at {STAGES[0].context} tokens ({recall})"


def claim(judged: Cells, able: dict[str, set[int]]) -> str:
    """Whether NoPE extends without re-tuning as well as RoPE with it: recall at the last length, all stages done."""
    last, key = len(STAGES) - 1, str(LENGTHS[-1])
    compared = ("nope", "rope", "rope_retuned")
    if any((v, last) not in judged or len(able[v]) < 2 for v in compared):
        return "no verdict: needs two able seeds of NoPE, RoPE and RoPE with its base retuned, all stages done"
    recall = {v: median(c["after"]["multi_key"][key] for c in judged[v, last].values()) for v in compared}
    words = "reproduces" if recall["nope"] >= max(ENOUGH, max(recall.values()) - CLOSE) else "does not reproduce"
    shown = ", ".join(f"{v} {r:.2f}" for v, r in recall.items())
    return (
        f"{words} at this size: recall at {key} tokens, {int(key) // STAGES[0].context}x the training length: {shown}"
    )


def across(cells: list[dict[str, Any]], when: str, key: str) -> dict[str, float]:
    return {name: round(median(c[when][key][name] for c in cells), 4) for name in cells[0][when][key]}
