"""What every stage is given: the recipe, the run directory, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nonet import tasks
from nonet.chat import Tokenizer
from nonet.harness import load_spec
from nonet.model import Model, hf
from nonet.pipeline.recipe import Recipe
from nonet.rl.budgets import BudgetConfig
from nonet.rl.setting import Setting
from nonet.run import Run


@dataclass
class Context:
    """part_of: the directory of the whole job, where run is one part of it in a directory of its own."""

    recipe: Recipe
    run: Run
    part_of: Path | None = None

    @property
    def root(self) -> Path:
        return self.part_of or self.run.path

    def models(self, name: str) -> Path:
        return self.root / "models" / name

    @property
    def policy(self) -> Path:
        """The model that the job ends with."""
        return self.models("rl" if self.recipe.experts is None else "distill")

    def export(self, model: Model, folder: Path) -> None:
        """A model directory that serves, with the job's tokenizer."""
        hf.save(model, folder)
        hf.copy_tokenizer(self.models("start"), folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.models("start"))

    def setting(self, *domains: str, efforts: Sequence[str] = ()) -> Setting:
        """The recipe's harness and rewards over these domains taking turns, at these efforts (the recipe's)."""
        t, seed = self.recipe.tasks, self.recipe.run.seed
        rewards = {t.reward: tasks.load_reward(t.reward)} if t.reward else None
        found = [tasks.tagged(tasks.load(t.sources[d], seed, t.difficulty), d) for d in domains]
        source = found[0] if len(found) == 1 else tasks.Mixture(",".join(domains), found)
        return Setting(source, load_spec(t.harness), self.tokenizer, rewards, tuple(efforts) or t.efforts, seed)

    @property
    def counting(self) -> BudgetConfig:
        """What counts as tokens of an attempt."""
        return self.recipe.effort.budget if self.recipe.effort is not None else BudgetConfig()

    def everything(self) -> Setting:
        return self.setting(*self.recipe.tasks.sources)
