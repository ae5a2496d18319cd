"""[effort]: reasoning effort trained by what writing costs. A Credit that changes rewards, then asks another one.

budget (K3)     r := -1 if T(y) > m b0(x); m falls geometrically from its first value to its last over `anneal` steps
toggle (K2.5)   for `phase` steps r := 0 if T(y) > m b(x) and the group's mean task reward is at least `accuracy`, where
                b(x) is a percentile of the cold start's correct attempts; then `phase` steps free; and again
length (k1.5)   l = 1/2 - (T - min T) / (max T - min T) over the group, 0 if all are equally long; r := r + weight l if
                the attempt is correct, r + weight min(0, l) if not; nothing in the first `warmup` steps

Why here and not where an attempt is scored: two of the rules look at the whole group, and all members must be held to
one m, though a relayed group's members end at different steps. What is parked keeps the task's own reward, so a killed
run decides again and alike.

The trap of budgets: where every member of a group is over budget all rewards are equal and nothing is learned, at worst
for good. The rule: the shortest members of such a group keep their own reward (`spare_shortest`), so that it
still learns to write less; and where that happens in most groups of a level, the step's event says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from nonet.config import Config
from nonet.model import Model
from nonet.rl.advantage import Credit, GroupMean
from nonet.rl.batch import Scored
from nonet.rl.budgets import BudgetConfig, Budgets
from nonet.rl.config import RLConfig
from nonet.rl.loop import Loop
from nonet.rl.setting import Setting
from nonet.run import Run
from nonet.types import EFFORTS, Task, Trajectory

OVER = "over_budget"  # name of the reward that replaces an attempt's own
_OFTEN = 0.5  # share of a level's groups wholly over budget from which the event warns


class EffortConfig(Config):
    rule: Literal["budget", "toggle", "length"] = "budget"
    # levels that are limited: "effort" or "domain:effort" (which goes first) -> m at the first step, and after `anneal`
    # steps. A level that is not named writes as much as it likes. The length rule only asks whether a level is named.
    # Defaults: calls and code cannot be spared, thoughts can, so general tasks are held to less.
    multipliers: Mapping[str, tuple[float, float]] = Field(
        default_factory=lambda: {
            "high": (2.0, 0.9), "low": (2.0, 0.65), "general:high": (2.0, 0.6), "general:low": (2.0, 0.3),
        }
    )  # fmt: skip
    anneal: int = Field(default=50, ge=1)
    spare_shortest: bool = True
    correct: float = 1.0  # a task reward from which an attempt counts as correct (toggle, length)
    phase: int = Field(default=5, ge=1)  # toggle: steps with the budget, and steps without, in turn
    accuracy: float = 0.5  # toggle: lambda, mean task reward from which a group is held to the budget
    percentile: float = Field(default=0.8, gt=0, le=1)  # toggle: rho
    weight: float = Field(default=1.0, gt=0)  # length: of l
    warmup: int = Field(default=0, ge=0)  # length: steps of plain RL before it
    budget: BudgetConfig = Field(default_factory=BudgetConfig)

    @field_validator("multipliers")
    @classmethod
    def _named(cls, value: Mapping[str, tuple[float, float]]) -> Mapping[str, tuple[float, float]]:
        for name, ends in value.items():
            if name.rpartition(":")[2] not in EFFORTS:
                raise ValueError(f"{name!r}: name a level effort or domain:effort, effort one of {', '.join(EFFORTS)}")
            if not all(0 < m < math.inf for m in ends):
                raise ValueError(
                    f"{name} = {list(ends)}: must be positive and finite; leave the level out for no limit"
                )
        return value

    def ends(self, domain: str, effort: str) -> tuple[float, float] | None:
        """First and last multiplier; None where the level is not limited."""
        return self.multipliers.get(f"{domain}:{effort}", self.multipliers.get(effort))

    def multiplier(self, task: Task, step: int) -> float:
        """m; infinite where the task's level is not limited."""
        ends = self.ends(task.domain, task.effort)
        if ends is None:
            return math.inf
        first, last = ends
        return first * (last / first) ** min(1.0, step / self.anneal)


# --------------------------------------------------------------------- rules


class Member(NamedTuple):
    """One scored member of a group: T, and the task's own reward."""

    tokens: int
    reward: float


@dataclass(frozen=True)
class Verdict:
    """over: who is over budget. rewards: what each attempt's are instead; None leaves them. trapped: all were over."""

    limit: float
    over: list[bool]
    rewards: list[dict[str, float] | None]
    trapped: bool = False


def judge(config: EffortConfig, budgets: Budgets, task: Task, members: Sequence[Member], step: int) -> Verdict:
    m = config.multiplier(task, step)
    if math.isinf(m):
        return Verdict(math.inf, [False] * len(members), [None] * len(members))
    if config.rule == "length":
        return Verdict(math.inf, [False] * len(members), _lengths(config, members, step))
    if config.rule == "toggle":
        limit = m * budgets.percentile(task, config.percentile, config.correct)
        mean = sum(member.reward for member in members) / len(members)
        held = step // config.phase % 2 == 0 and mean >= config.accuracy
        return _held(limit if held else math.inf, members, 0.0, config.spare_shortest)
    return _held(m * budgets.mean(task), members, -1.0, config.spare_shortest)


def _held(limit: float, members: Sequence[Member], penalty: float, spare: bool) -> Verdict:
    over = [member.tokens > limit for member in members]
    shortest = min(member.tokens for member in members)
    trapped = all(over)
    spared = [spare and trapped and member.tokens == shortest for member in members]
    rewards = [{OVER: penalty} if o and not s else None for o, s in zip(over, spared, strict=True)]
    return Verdict(limit, over, rewards, trapped)


def _lengths(config: EffortConfig, members: Sequence[Member], step: int) -> list[dict[str, float] | None]:
    tokens = [member.tokens for member in members]
    low, high = min(tokens), max(tokens)
    if low == high or step < config.warmup:
        return [None] * len(members)
    out: list[dict[str, float] | None] = []
    for member in members:
        bonus = 0.5 - (member.tokens - low) / (high - low)
        bonus = bonus if member.reward >= config.correct else min(0.0, bonus)
        out.append({"task": member.reward, "length": config.weight * bonus})
    return out


# -------------------------------------------------------------------- credit


class Effort:
    """A Credit over `credit`. `on_step` is the loop's hook of that name."""

    def __init__(self, config: EffortConfig, budgets: Budgets, setting: Setting, credit: Credit):
        self.config, self.budgets, self.setting, self.credit = config, budgets, setting, credit
        self.step = 0
        self._cells: dict[tuple[str, str], _Cell] = {}

    def on_step(self, step: int) -> None:
        self.step = step

    def __call__(self, groups: Sequence[list[Trajectory]]) -> list[Scored]:
        self._cells = {}
        for group in groups:
            self._judge([t for t in group if t.status == "done"])
        return self.credit(groups)

    def explain(self, trajectory: Trajectory) -> dict[str, list[float]]:
        return self.credit.explain(trajectory)

    @property
    def figures(self) -> Mapping[str, Any]:
        """effort: a row a domain and level. effort_warnings: sentences."""
        levels = (*EFFORTS, "")
        cells = sorted(self._cells.items(), key=lambda kv: (kv[0][0], levels.index(kv[0][1])))
        rows = [{"domain": domain, "effort": effort, **cell.row()} for (domain, effort), cell in cells]
        warnings = [
            f"{domain}:{effort}: every attempt was over budget in {cell.trapped} of {cell.groups} groups; "
            "anneal more slowly, or end at a larger multiplier"
            for (domain, effort), cell in cells
            if cell.trapped > _OFTEN * cell.groups
        ]
        return {**self.credit.figures, "effort": rows, **({"effort_warnings": warnings} if warnings else {})}

    def _judge(self, done: list[Trajectory]) -> None:
        """Changes the rewards of one group's scored members."""
        if not done:
            return
        task = self.setting.task("train", done[0].group)
        members = [Member(self.config.budget.spent(t, task, self.setting), t.reward) for t in done]
        verdict = judge(self.config, self.budgets, task, members, self.step)
        for t, rewards in zip(done, verdict.rewards, strict=True):
            t.rewards = t.rewards if rewards is None else rewards
        cell = self._cells.setdefault((task.domain, task.effort), _Cell(self.config.multiplier(task, self.step)))
        cell.add(verdict, members, [t.reward for t in done])


@dataclass
class _Cell:
    """Sums over the groups of one domain and level in one step."""

    multiplier: float
    groups: int = 0
    trapped: int = 0
    dead: int = 0
    over: int = 0
    limits: list[float] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def add(self, verdict: Verdict, members: Sequence[Member], rewards: Sequence[float]) -> None:
        self.groups += 1
        self.trapped += verdict.trapped
        self.dead += len(set(rewards)) < 2
        self.over += sum(verdict.over)
        self.limits.append(verdict.limit)
        self.members += members
        self.rewards += rewards

    def row(self) -> dict[str, float | None]:
        """Means over attempts; limit, trapped and dead (all rewards equal) over groups. task_reward is before the rule,
        reward after it. A multiplier or a limit that is infinite is None.
        """
        n, limit = len(self.members), sum(self.limits) / len(self.limits)
        return {
            "attempts": n, "groups": self.groups,
            "tokens": sum(m.tokens for m in self.members) / n,
            "task_reward": sum(m.reward for m in self.members) / n, "reward": sum(self.rewards) / n,
            "over": self.over / n, "trapped": self.trapped / self.groups, "dead": self.dead / self.groups,
            "multiplier": None if math.isinf(self.multiplier) else self.multiplier,
            "limit": None if math.isinf(limit) else limit,
        }  # fmt: skip


def budgeted(
    model: Model, setting: Setting, config: EffortConfig, budgets: Budgets, rl: RLConfig, run: Run, seed: int = 0
) -> Loop:
    """The RL loop with this credit over the group mean."""
    credit = Effort(config, budgets, setting, GroupMean.of(rl))
    return Loop(model, setting, rl, run, seed, credit=credit, on_step=credit.on_step)
