"""What tests of distillation play with: attempts at real tasks, and teachers that say what they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import made
import tiny

from nonet.chat import Tokenizer
from nonet.engine.scoring import Passage
from nonet.harness.episode import Episode
from nonet.model import Model
from nonet.rl import RLConfig
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.learner import Learner
from nonet.rl.opd import OPD
from nonet.rl.setting import Setting, open_sandbox
from nonet.rl.teacher import Seat
from nonet.types import Segment, Trajectory

CELLS = (("agents", "low"), ("general", "low"))


def attempt(setting: Setting, model: Model, group: int, sample: int = 0, parts: Sequence[made.Part] = (("policy", 5),),
            version: int = 0, **over: object) -> Trajectory:  # fmt: skip
    """A finished attempt at the setting's task: its real prompt, then random tokens, with the model's log-probs."""
    task = setting.task("train", group)
    sandbox = open_sandbox(task, None)
    try:
        prompt = Episode(task, setting.spec, setting.tokenizer, sandbox).prompt()
    finally:
        if sandbox is not None:
            sandbox.close()
    vocab = setting.tokenizer.vocab_size
    t = made.trajectory(group, sample, parts, vocab, task_id=task.id, **over)
    t.segments.insert(0, Segment("prompt", tuple(prompt)))
    return made.written_by(model, t, version)


@dataclass
class Told:
    """A Teacher that gives the k-th response token the log-prob says(k), and remembers what it was asked."""

    says: Callable[[int], float] = lambda k: -float(k)
    where: str = "told"
    asked: list[Passage] = field(default_factory=list)
    temperatures: set[float] = field(default_factory=set)

    def __hash__(self) -> int:
        return id(self)

    def logprobs(self, passages: Sequence[Passage], temperature: float) -> list[list[float]]:
        self.asked += passages
        self.temperatures.add(temperature)
        return [[self.says(k) for k in range(len(p.tokens) - p.first)] for p in passages]

    def require_vocabulary(self, student: Tokenizer, who: str) -> None:
        pass


def credit(setting: Setting, model: Model, teachers: dict, samples: int = 2, version: int = 0, temperature: float = 1.0,
           **config: object) -> OPD:  # fmt: skip
    learner = Learner(model, RLConfig(samples=samples, temperature=temperature))
    learner.version = version
    return OPD(DistillConfig.model_validate(config), Experts(teachers, Seat()), setting, learner)


def setting(tokenizer: Tokenizer, **over: object) -> Setting:
    return tiny.setting(tokenizer, **over)
