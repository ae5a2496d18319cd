"""One run of `nonet bench partial`: a kind of work, a pause fraction, a seed.

FOLDER/start-SEED/          tokenizer and cold start of recipes/nano-rl.toml, quick profile      (pipeline/stages.py)
FOLDER/KIND-FRACTION-SEED/  the run directory of the loop, which continues where it was stopped
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

import numpy as np

from nonet.bench.qat import RECIPE
from nonet.engine import Engine
from nonet.model import Model, hf
from nonet.model.init import initialise
from nonet.ops.rng import stream_key, uniforms
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import OwnDraftTable, load_recipe
from nonet.pipeline.runner import run_stages
from nonet.pipeline.stages import BEGIN
from nonet.protocols import Sandbox
from nonet.rl import Loop, RLConfig
from nonet.rl.evaluate import evaluate
from nonet.run import Run
from nonet.types import Message, Request, Task

FOLDER = Path("runs/bench-partial")
KINDS = ("tail", "nano")
MEDIAN, SIGMA, CAP = 16, 1.0, 16  # of the scripted lengths: log-normal, capped at so many medians
CURVE_POINTS = 8  # evaluations of the nano policy over a run

Point = dict[str, Any]  # one iteration: what it did, what it took, the reward then


@dataclass(frozen=True)
class Scale:
    """rounds: how often `groups` groups are trained; heldout: prompts by which the nano policy is judged."""

    groups: int
    samples: int
    rounds: int
    heldout: int


FULL, SHORT = Scale(24, 8, 16, 120), Scale(8, 4, 6, 12)


@dataclass(frozen=True)
class Cell:
    kind: str
    fraction: float
    seed: int
    scale: Scale

    @property
    def name(self) -> str:
        s = self.scale
        return f"{self.kind}-{self.fraction:g}-{s.groups}x{s.samples}x{s.rounds}-{self.seed}"

    @property
    def steps(self) -> int:
        """Iterations that train as many groups as the synchronous rounds, but for what is in flight at the end."""
        return math.ceil(self.scale.rounds / self.fraction)

    @property
    def config(self) -> RLConfig:
        s = self.scale
        return RLConfig(
            steps=self.steps, groups=s.groups, samples=s.samples, fraction=self.fraction, optimizer="muon", lr=5e-4,
            warmup=5, max_batch=s.groups * s.samples, keep_groups=0, micro_tokens=4096,
            max_tokens=MEDIAN * CAP if self.kind == "tail" else 128,
        )  # fmt: skip


def result(cell: Cell) -> list[Point]:
    """The iterations of a cell; what has not been run yet is run now."""
    run = Run(FOLDER / cell.name, {"cell": cell.name, "rl": cell.config.model_dump(mode="json")})
    if last(run) < cell.steps:
        play(cell, run)
    judged = {e["step"]: e["reward"] for e in run.events("heldout")}
    return [point(e, judged.get(e["step"]) if cell.kind == "nano" else e["reward"]) for e in run.events("rl_step")]


def point(e: Mapping[str, Any], reward: float | None) -> Point:
    names = ("groups", "decode_steps", "prefilled", "trained_tokens", "age_mean", "age_max")
    seconds = {"wall": e["rollout_s"] + e["update_s"], "cpu": e["cpu_s"]}
    return {**{name: e[name] for name in names}, **seconds, "reward": reward if e["groups"] else None}


def last(run: Run) -> int:
    return max((e["step"] for e in run.events("rl_step")), default=0)


def play(cell: Cell, run: Run) -> None:
    start = started(cell.seed)
    if cell.kind == "tail":
        model = initialise(Model(start.recipe.model_config_for(start.tokenizer.vocab_size)), cell.seed)
        setting = replace(start.setting("general.add"), rewards={"digits": digits})
        engine = Tailed(model, cell.seed, cell.config.max_tokens, cell.config.max_batch)
        Loop(model, setting, cell.config, run, cell.seed, engine=engine).fit()
        return
    model, every = hf.load(start.models("cold")), max(1, cell.steps // CURVE_POINTS)

    def judge(step: int) -> None:
        if step and (step % every == 0 or step == cell.steps):
            played = evaluate(model, start.everything(), range(cell.scale.heldout), 1.0, 128)
            run.event("heldout", step=step, reward=mean(t.reward for t in played if t.status == "done"))

    Loop(model, start.everything(), cell.config, run, cell.seed, on_step=judge).fit()
    judge(cell.steps)


@lru_cache(maxsize=1)
def started(seed: int) -> Context:
    recipe = load_recipe([RECIPE], [f"run.seed={seed}", "run.threads=1"], quick=True)
    recipe = recipe.model_copy(update={"draft": OwnDraftTable()})  # the draft's settings decide nothing here
    return Context(recipe, run_stages(recipe, FOLDER / f"start-{seed}", BEGIN[:2]))


def digits(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """Share of digits in what was said: something to learn that has nothing to do with length."""
    said = transcript[-1].text
    return sum(c.isdigit() for c in said) / max(1, len(said))


class Tailed(Engine):
    """An engine in which every trajectory ends after a scripted number of tokens: log-normal, drawn by its stream.

    budget: the loop's max_tokens; what a request has left of it says how much was written before a pause.
    """

    def __init__(self, model: Model, seed: int, budget: int, max_batch: int):
        super().__init__(model, max_batch)
        self.seed, self.budget = seed, budget

    def submit(self, request: Request) -> None:
        left = self.length(request.stream) - (self.budget - request.max_tokens)
        super().submit(replace(request, stop_ids=(), max_tokens=left))

    def length(self, stream: str) -> int:
        key = np.array([stream_key(self.seed, f"length/{stream}")], np.uint64)
        normal = NormalDist().inv_cdf(max(1e-12, float(uniforms(key, np.zeros(1, np.uint64))[0])))
        return min(self.budget, max(1, round(MEDIAN * math.exp(SIGMA * normal))))
