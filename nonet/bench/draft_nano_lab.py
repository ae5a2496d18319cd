"""One backbone of `nonet bench draft_nano`: its answers, their features, and drafts trained and measured on them.

FOLDER/backbone-SEED/     tokenizer and cold start of recipes/nano-rl.toml, quick profile      (pipeline/stages.py)
FOLDER/answers-SEED/      what it says to training tasks, and FOLDER/other-SEED to other ones
FOLDER/features-SEED/     its hidden states there
FOLDER/runs, drafts, results     of each cell; a cell whose result is there is not run again
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from nonet.bench.qat import RECIPE
from nonet.draft import files
from nonet.draft.config import DraftConfig, eagle3_config, mtp_config
from nonet.draft.model import Draft, started
from nonet.draft.store import FeatureStore
from nonet.draft.train import TrainConfig
from nonet.model import Model, hf
from nonet.model.init import initialise
from nonet.ops.overlap_rules import Kind
from nonet.pipeline.context import Context
from nonet.pipeline.draft_eval import by_domain, figures
from nonet.pipeline.draft_play import ANSWERS_FROM, Policy
from nonet.pipeline.draft_stage import captured, fit, policy_of
from nonet.pipeline.recipe import OwnDraftTable, load_recipe
from nonet.pipeline.runner import run_stages
from nonet.pipeline.stages import BEGIN
from nonet.quant import QuantConfig
from nonet.run import Run, write_atomic

FOLDER = Path("runs/draft-nano")
LEARNT, CHOSEN_BY, MEASURED, DRAFTED = 400, 16, 80, 7  # tasks of each domain; tokens drafted at a time
STEPS, BATCH, WINDOW = 80, 1024, 512  # of tuning, all cells alike, on the same batches
ADDED_STEPS = 240  # of an MTP layer that comes after the backbone, on other answers
RATE = 5e-3  # of Muon, as the backbone is trained with
OTHER_TASKS = ANSWERS_FROM + 1_000_000

Start = Literal["cotrained", "added", "random"]


@dataclass(frozen=True)
class Cell:
    """start: the MTP layer that was trained with the backbone, one that was added afterwards, a random EAGLE-3 layer.
    tuned False: measured as it starts. rounded_from: a cell whose draft this one is, its experts on the MX grid.
    """

    name: str
    unroll: int = 7
    fusion: bool = True
    loss: Kind = "overlap"
    start: Start = "cotrained"
    tuned: bool = True
    quantised: bool = False
    rounded_from: str = ""


def result(seed: int, cell: Cell) -> dict[str, Any]:
    """Of a cell on a backbone; made now if it is not there."""
    file = FOLDER / "results" / f"{cell.name}-{seed}.json"
    if not file.exists():
        found = backbone(seed).run(cell)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(found, indent=1))
    return json.loads(file.read_text())


@lru_cache(maxsize=1)
def backbone(seed: int) -> Backbone:
    recipe = load_recipe([RECIPE], [f"run.seed={seed}", "run.threads=1"], quick=True)
    recipe = recipe.model_copy(update={"draft": OwnDraftTable()})  # the stage's own settings decide nothing here
    c = Context(recipe, run_stages(recipe, FOLDER / f"backbone-{seed}", BEGIN[:2]))
    return Backbone(seed, policy_of(c, hf.load(c.models("cold"))))


class Backbone:
    def __init__(self, seed: int, policy: Policy):
        self.seed, self.policy, self.model = seed, policy, policy.model
        self.mtp = mtp_config(self.model.config)

    def run(self, cell: Cell) -> dict[str, Any]:
        """Make the cell's draft and measure it at temperature 1."""
        draft = self._draft(cell)
        told = self.policy.told(draft, 1.0, MEASURED, DRAFTED)
        parameters = sum(p.numel() for p in draft.parameters())
        facts = {"parameters": parameters, "trained_steps": draft.config.trained_steps}
        return {**figures(told), "domains": by_domain(told), **facts}

    def _draft(self, cell: Cell) -> Draft:
        out = FOLDER / "drafts" / f"{cell.name}-{self.seed}"
        if (out / "config.json").exists():
            return files.load(out, self.model)
        draft = self._start(cell)
        if cell.tuned:
            self._train(draft, self._stores, training(STEPS, cell.unroll, cell.loss, cell.fusion), cell.name)
        self._keep(draft, out)
        return draft

    def _start(self, cell: Cell) -> Draft:
        if cell.start == "random":
            return started(eagle3_config(self.model.config, taps=self.mtp.taps), self.model, seed=self.seed)
        draft = started(self._quantised if cell.quantised else self.mtp, self.model)
        if cell.rounded_from:
            draft.load_state_dict(
                files.load(FOLDER / "drafts" / f"{cell.rounded_from}-{self.seed}", self.model).state_dict()
            )
        if cell.start == "added":
            draft.load_state_dict(self._added().state_dict())
        return draft

    def _added(self) -> Draft:
        """An MTP layer that the backbone never had: random, then trained one step ahead on answers to other tasks. As
        its target's whole distribution is known there, that is what it learns, and not one sampled token.
        """
        out = FOLDER / "drafts" / f"added-{self.seed}"
        if (out / "config.json").exists():
            return files.load(out, self.model)
        fresh = initialise(Model(self.model.config), self.seed + 1000)
        assert fresh.mtp is not None
        draft = started(self.mtp, self.model)
        draft.mtp.load_state_dict(fresh.mtp.state_dict())
        self._train(draft, self._captured("other", OTHER_TASKS), training(ADDED_STEPS, 1, "kl", False), "added")
        self._keep(draft, out)
        return draft

    @property
    def _quantised(self) -> DraftConfig:
        return mtp_config(self.model.config, quant=QuantConfig())

    # ------------------------------------------------------------------ pieces

    @cached_property
    def _stores(self) -> tuple[FeatureStore, FeatureStore]:
        return self._captured("answers", ANSWERS_FROM)

    def _captured(self, name: str, first: int) -> tuple[FeatureStore, FeatureStore]:
        """Features of training rows, and of those by which drafts are chosen."""
        answers = self.policy.answers(FOLDER / f"{name}-{self.seed}", LEARNT, CHOSEN_BY, first)
        folder = FOLDER / f"features-{self.seed}" / name
        learnt, held = (captured(self.model, answers, side, folder, self.mtp) for side in (False, True))
        return learnt, held

    def _train(self, draft: Draft, stores: tuple[FeatureStore, FeatureStore], config: TrainConfig, name: str) -> None:
        run = Run(FOLDER / "runs" / f"{name}-{self.seed}", config.model_dump(mode="json"))
        fit(draft, *stores, WINDOW, BATCH, config, run, "draft", latest)

    @staticmethod
    def _keep(draft: Draft, out: Path) -> None:
        partial = out.with_name(f".{out.name}")
        shutil.rmtree(partial, ignore_errors=True)
        files.save(draft, partial)
        partial.rename(out)


def training(steps: int, unroll: int, loss: Kind, fusion: bool) -> TrainConfig:
    return TrainConfig(
        steps=steps, unroll=unroll, loss=loss, train_fusion=fusion, optimizer="muon", lr=RATE, eval_every=steps // 4
    )


def latest(_: Draft) -> float:
    """Scores by which the last draft is kept: cells are compared at equal tokens, and none is chosen."""
    return time.time()
