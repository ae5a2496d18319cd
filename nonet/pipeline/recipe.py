"""A recipe: one table per room. `nonet check` prints it resolved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from nonet.config import Config, build, read
from nonet.lm.trainer import LMConfig
from nonet.model.config import ModelConfig
from nonet.rl.config import RLConfig
from nonet.types import EFFORTS, UserError


class RunTable(Config):
    seed: int = 0
    threads: int = Field(0, ge=0)  # torch threads; 0: as torch finds them


class StartTable(Config):
    model: str = ""  # a model directory to start from; empty: train a tokenizer and build [model] from scratch
    vocab_size: int = Field(512, ge=270)  # of the tokenizer that is trained when `model` is empty
    tokenizer_rows: int = Field(3000, ge=100)  # demonstrations the tokenizer learns its merges from


class TasksTable(Config):
    sources: dict[str, str] = {"general": "general", "agents": "agents", "coding": "coding"}  # domain -> task spec
    difficulty: int = Field(1, ge=1)
    efforts: tuple[str, ...] = ("max",)
    harness: str = "terse"
    reward: str = ""  # score every task with this instead of its own rewards: a built-in name or "pkg.module:function"

    @field_validator("efforts")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for effort in value:
            if effort not in EFFORTS:
                raise ValueError(f"{effort!r} is not an effort; use {', '.join(EFFORTS)}")
        return value


class EvalTable(Config):
    prompts: int = Field(1000, ge=2)  # held-out prompts per domain and mode


class Recipe(Config):
    run: RunTable = RunTable()
    start: StartTable = StartTable()
    model: dict[str, Any] = {}
    tasks: TasksTable = TasksTable()
    cold: LMConfig | None = None  # absent: no cold start
    rl: RLConfig = RLConfig()
    eval: EvalTable = EvalTable()

    def model_config_for(self, vocab_size: int) -> ModelConfig:
        if "vocab_size" in self.model:
            raise UserError("model.vocab_size: is the tokenizer's; set start.vocab_size")
        return build(ModelConfig, {**self.model, "vocab_size": vocab_size}, "model")


def load_recipe(files: Sequence[Path | str], overrides: Sequence[str] = (), quick: bool = False) -> Recipe:
    """Merge files left to right, then --quick's overlay (NAME.quick.toml beside the last file), then --set."""
    paths = [Path(f) for f in files]
    if quick:
        overlay = paths[-1].with_suffix(".quick.toml")
        if not overlay.exists():
            raise UserError(f"--quick: {overlay} does not exist; a recipe's quick profile lies beside it")
        paths.append(overlay)
    recipe = build(Recipe, read(paths, overrides))
    if not recipe.start.model:
        recipe.model_config_for(recipe.start.vocab_size)
    return recipe
