"""What every stage is given: the recipe, the run directory, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nonet import tasks
from nonet.chat import Tokenizer
from nonet.harness import load_spec
from nonet.pipeline.recipe import Recipe
from nonet.rl.setting import Setting
from nonet.run import Run


@dataclass
class Context:
    recipe: Recipe
    run: Run

    def models(self, name: str) -> Path:
        return self.run.path / "models" / name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.models("start"))

    def setting(self, spec: str) -> Setting:
        """The recipe's harness, rewards and efforts over one task spec."""
        t, seed = self.recipe.tasks, self.recipe.run.seed
        rewards = {t.reward: tasks.load_reward(t.reward)} if t.reward else None
        source = tasks.load(spec, seed=seed, difficulty=t.difficulty)
        return Setting(source, load_spec(t.harness), self.tokenizer, rewards, t.efforts, seed)

    def everything(self) -> Setting:
        return self.setting(",".join(self.recipe.tasks.sources.values()))
