"""[distill]: on-policy distillation as a reward (opd.py), and which expert teaches which task.

An expert is named by domain and effort, "agents:low". Every task that can come up has exactly one; a task without an
expert and an expert without a task are both refused before anything is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from nonet.chat import Tokenizer
from nonet.config import Config
from nonet.rl.kl import FullKL, KLConfig, TopKL
from nonet.rl.objective import Objective
from nonet.rl.setting import Cell, Setting
from nonet.rl.teacher import LocalTeacher, Seat, Teacher
from nonet.types import EFFORTS, Task, UserError

_LOOKED_AT = 512  # train tasks in which every domain and effort is expected to come up


class DistillConfig(Config):
    experts: dict[str, str] = Field(default_factory=dict)  # "domain:effort" -> model directory, PEFT directory or URL
    r_max: float = Field(default=5.0, gt=0)  # a token's reward log pi_teacher - log pi_student is clipped to +-r_max
    discount: float = Field(default=0.0, ge=0, le=1)  # 0: a token answers for itself; 1: for all that follows too
    outcome: float = Field(default=0.0, ge=0)  # weight of the group-mean advantage of the tasks' own rewards, added
    student: Literal["current", "behaviour"] = "current"  # whose log-prob is in the reward: the weights the update
    # begins with (K3 prints pi_theta), or those that sampled the token
    teacher_effort: bool = False  # the teacher's prompt names the effort too; K3's does not
    dtype: Literal["float32", "bfloat16"] = "float32"  # of local teachers' weights
    loss: Literal["reward", "kl_full", "kl_topk"] = "reward"  # reward: the sampled token, through rl.objective; the
    # others put reverse KL over the vocabulary into the loss (kl.py) and need local teachers
    kl: KLConfig = Field(default_factory=KLConfig)

    @field_validator("experts")
    @classmethod
    def _named(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            domain, _, effort = name.partition(":")
            if not domain or effort not in EFFORTS:
                raise ValueError(f"{name!r}: name an expert domain:effort, effort one of {', '.join(EFFORTS)}")
        return value

    @property
    def objective(self) -> Objective | None:
        """What the learner is given; None: the one that rl.objective names."""
        return {"reward": None, "kl_full": FullKL(), "kl_topk": TopKL(self.kl)}[self.loss]

    @property
    def efforts(self) -> tuple[str, ...]:
        """The levels that have an expert."""
        found = {name.partition(":")[2] for name in self.experts}
        return tuple(e for e in EFFORTS if e in found)


class Experts:
    """Teachers by (domain, effort). Local ones share a seat, so at most one's weights exist beside the student's."""

    def __init__(self, teachers: Mapping[Cell, Teacher], seat: Seat):
        self.teachers, self.seat = dict(teachers), seat

    @staticmethod
    def open(config: DistillConfig, deterministic: bool = False) -> Experts:
        seat = Seat()
        made: dict[str, Teacher] = {
            where: open_teacher(where, seat, config.dtype, deterministic) for where in config.experts.values()
        }
        cells = {name: tuple(name.split(":")) for name in config.experts}
        return Experts({(cells[n][0], cells[n][1]): made[where] for n, where in config.experts.items()}, seat)

    def of(self, task: Task) -> Teacher:
        if (task.domain, task.effort) not in self.teachers:
            raise UserError(
                f"task {task.id}: no expert for {task.domain}:{task.effort}; "
                f"give one with --expert {task.domain}:{task.effort}=DIR, or leave such tasks out"
            )
        return self.teachers[task.domain, task.effort]

    def in_turn(self, teachers: Sequence[Teacher]) -> list[Teacher]:
        """Each once; whose weights are in memory goes first, so that no weights are read twice in a row."""
        return sorted(set(teachers), key=lambda t: (t.where != self.seat.holds, t.where))

    # ------------------------------------------------------------- pre-flight

    def require(self, student: Tokenizer) -> None:
        """UserError, naming the expert, unless all read the ids that the student writes."""
        for cell, teacher in self.teachers.items():
            teacher.require_vocabulary(student, f"expert {':'.join(cell)}")

    def shares(self, setting: Setting) -> dict[Cell, float]:
        """Share of the training tasks that each expert teaches. UserError for a task without an expert and for an
        expert without a task.
        """
        counts = dict.fromkeys(self.teachers, 0)
        for i in range(_LOOKED_AT):
            task = setting.task("train", i)
            self.of(task)
            counts[task.domain, task.effort] += 1
        for (domain, effort), count in counts.items():
            if not count:
                raise UserError(
                    f"expert {domain}:{effort}: none of the first {_LOOKED_AT} training tasks is one of its; "
                    "leave it out, or give tasks of this domain"
                )
        return {cell: count / _LOOKED_AT for cell, count in counts.items()}


def open_teacher(where: str, seat: Seat, dtype: str, deterministic: bool) -> Teacher:
    """The teacher at a directory or an address, not yet loaded. UserError where there is none."""
    if where.startswith(("http://", "https://")):
        from nonet.rl.served import ServedTeacher  # its HTTP client is an extra

        return ServedTeacher(where)
    if not Path(where).is_dir():
        raise UserError(f"expert {where}: no such directory; name a model directory, a PEFT directory or http://...")
    return LocalTeacher(where, seat, dtype, deterministic)
