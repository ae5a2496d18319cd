"""One course of `nonet bench staleness`: a policy updated a number of times, always with batches of one age.

At every update the current policy samples a batch, which waits for `age` updates until it is trained; before the first
update the initial policy samples `age` batches, so that the first ones trained are younger. Two games: a toy whose
expected reward is a sum over all answers, and recipes/nano-rl.toml's policy after its cold start (quick profile).

FOLDER/results/GAME-NAME-age-SEED.json   reward at the end, course of the toy's reward, figures by age
FOLDER/backbone/                         tokenizer and cold start of the nano policy                (pipeline/stages.py)
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nonet.bench.qat import RECIPE
from nonet.engine import Engine
from nonet.model import Model, ModelConfig, Rope, hf
from nonet.model.init import initialise
from nonet.ops.rng import stream_key
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import load_recipe
from nonet.pipeline.runner import run_stages
from nonet.pipeline.stages import BEGIN
from nonet.rl.advantage import GroupMean
from nonet.rl.config import RLConfig
from nonet.rl.evaluate import evaluate
from nonet.rl.learner import Learner
from nonet.rl.packing import pack
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import scorer
from nonet.run import write_atomic
from nonet.types import Request, Sampling, Segment, Trajectory

FOLDER = Path("runs/staleness")
GameName = Literal["toy", "nano"]


@dataclass(frozen=True)
class Cell:
    """objective: its name in the recipe; knobs: what of its table is not as it comes."""

    game: GameName
    objective: str
    age: int
    knobs: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return ", ".join([self.objective, *(f"{k} {v}" for k, v in self.knobs)])

    @property
    def overrides(self) -> dict[str, Any]:
        return {"objective": self.objective, self.objective: dict(self.knobs)}


class Game(Protocol):
    learner: Learner
    engine: Engine
    updates: int

    def groups(self, turn: int) -> list[list[Trajectory]]:
        """Complete groups sampled by the policy as it is; turn: which batch of the course this is."""
        ...

    def reward(self) -> float:
        """What the policy as it is earns: exactly, or on held-out tasks."""
        ...


def result(cell: Cell, seed: int) -> dict[str, Any]:
    """Of a course; run now if it is not there."""
    file = FOLDER / "results" / f"{cell.game}-{cell.name}-{cell.age}-{seed}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(course(GAMES[cell.game](cell, seed), cell.age)))
    return json.loads(file.read_text())


def course(game: Game, age: int) -> dict[str, Any]:
    credit = GroupMean.of(game.learner.config)
    waiting = deque(credit(game.groups(turn)) for turn in range(age))
    stats: dict[str, Any] = {}
    for update in range(game.updates):
        waiting.append(credit(game.groups(age + update)))
        stats = game.learner.step(pack(waiting.popleft(), game.learner.config.max_tokens))
        game.engine.load(game.learner.version)
    return {"reward": game.reward(), "clipped": stats["masked"], "kl": stats["kl"], "ages": stats["ages"]}


# ---------------------------------------------------------------------------------------- the toy


class Toy:
    """Each of PROMPTS two-token prompts has a secret answer of ANSWER tokens; reward: share of places that match it.

    The policy is a one-layer model, sampled by the engine and trained by the learner; its expected reward is summed
    over all WORDS ** ANSWER answers to every prompt.
    """

    WORDS, ANSWER, PROMPTS, GROUPS, SAMPLES = 6, 4, 8, 8, 8
    updates = 60

    def __init__(self, cell: Cell, seed: int):
        self.seed = seed
        config = RLConfig.model_validate(
            {"samples": self.SAMPLES, "max_tokens": self.ANSWER, "lr": 2e-3, "warmup": 0, **cell.overrides}
        )
        model = initialise(Model(tiny(self.WORDS)), seed)
        self.learner, self.engine = Learner(model, config), Engine(model, self.GROUPS * self.SAMPLES)
        self.prompts = list(product(range(self.WORDS), repeat=2))[: self.PROMPTS]
        self.secrets = [
            tuple(stream_key(seed, f"secret/{p}/{i}")[0] % self.WORDS for i in range(self.ANSWER))
            for p in range(self.PROMPTS)
        ]

    def groups(self, turn: int) -> list[list[Trajectory]]:
        first = turn * self.GROUPS
        made = [[self._opened(g, s) for s in range(self.SAMPLES)] for g in range(first, first + self.GROUPS)]
        by_id = {t.id: t for group in made for t in group}
        for t in by_id.values():
            self.engine.submit(Request(t.id, t.tokens, self.ANSWER, sampling=Sampling(seed=self.seed), stream=t.id))
        for c in self.engine.run():
            t = by_id[c.id]
            t.append(Segment("policy", c.tokens, c.logprobs, c.raw_logprobs, c.policy_version))
            secret = self.secrets[t.group % self.PROMPTS]
            t.status, t.rewards = "done", {"match": sum(map(int.__eq__, c.tokens, secret)) / self.ANSWER}
        return made

    def _opened(self, group: int, sample: int) -> Trajectory:
        prompt = group % self.PROMPTS
        return Trajectory(f"toy/{prompt}", group, sample, [Segment("prompt", self.prompts[prompt])])

    @cached_property
    def _answers_AT(self) -> Tensor:
        return torch.tensor(list(product(range(self.WORDS), repeat=self.ANSWER)))

    @torch.no_grad()
    def reward(self) -> float:
        """Mean over prompts of sum_y pi(y) reward(y)."""
        answers_AT, model, total = self._answers_AT, self.learner.model, 0.0
        for prompt, secret in zip(self.prompts, self.secrets, strict=True):
            tokens_AT = torch.cat([torch.tensor(prompt).expand(len(answers_AT), 2), answers_AT], 1)
            logp_ATW = model.logits(model(tokens_AT)[:, 1:-1]).double().log_softmax(-1)
            p_A = logp_ATW.gather(2, answers_AT[..., None])[..., 0].sum(1).exp()
            total += float((p_A * (answers_AT == torch.tensor(secret)).double().mean(1)).sum())
        return total / self.PROMPTS


def tiny(words: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=words, d_model=32, layers=1, d_ff=64, mixers=("gqa",), heads=2, activation="silu", rope=Rope(),
        max_position=64, init_std=0.1,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- nano


class Nano:
    """recipes/nano-rl.toml's policy, optimiser and tasks; reward: sampled, on MEASURED held-out tasks."""

    GROUPS, MEASURED = 16, 300
    updates = 24

    def __init__(self, cell: Cell, seed: int):
        c = backbone()
        recipe = c.recipe.rl.model_dump() | {"groups": self.GROUPS, "steps": self.updates, **cell.overrides}
        config = RLConfig.model_validate(recipe)
        model = hf.load(c.models("cold"))
        self.seed, self.setting = seed, c.everything()
        self.learner, self.engine = Learner(model, config), Engine(model, config.max_batch)
        sampling = Sampling(temperature=config.temperature, seed=seed)
        score = scorer(self.setting.rewards_of)
        self.rollout = Rollout(self.engine, self.setting.opener("train"), score, sampling, config.max_tokens)

    def groups(self, turn: int) -> list[list[Trajectory]]:
        """Every seed plays other tasks."""
        first = 1_000_000 * self.seed + turn * self.GROUPS
        made = [
            [Trajectory(self.setting.task("train", g).id, g, s) for s in range(self.learner.config.samples)]
            for g in range(first, first + self.GROUPS)
        ]
        everyone = [t for group in made for t in group]
        self.rollout.run(everyone, len(everyone))
        return made

    def reward(self) -> float:
        config = self.learner.config
        told = evaluate(self.learner.model, self.setting, range(self.MEASURED), config.temperature, config.max_tokens)
        return sum(t.reward for t in told) / len(told)


@lru_cache(maxsize=1)
def backbone() -> Context:
    recipe = load_recipe([RECIPE], ["run.threads=1"], quick=True)
    return Context(recipe, run_stages(recipe, FOLDER / "backbone", BEGIN[:2]))


GAMES: dict[GameName, type[Toy] | type[Nano]] = {"toy": Toy, "nano": Nano}
