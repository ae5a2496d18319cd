"""What training on old samples costs: reward after equal updates at controlled ages, by objective and by regulariser.

A batch of age n was sampled by the policy of n updates ago. `rewards`: eight objectives with the knobs they come with,
ages 0 to 8. `regulariser`: K25 with tau above 0 less K25 with tau 0, paired by seed (same start, tasks and random
numbers), its square anchored on each token's own behaviour policy or on the policy that the iteration began with.
Intervals are over seeds (Student's t). Two games: `toy`, whose expected reward is exact, is what runs by default;
`--only nano` plays recipes/nano-rl.toml's policy on fewer cells. Every course is kept under runs/staleness, and a run
that was stopped continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from nonet.bench.staleness_lab import GAMES, Cell, GameName, result
from nonet.progress import progress
from nonet.rl.config import ObjectiveName
from nonet.types import UserError

STUDENT = {2: 4.303, 5: 2.571, 7: 2.365}  # 97.5% of Student's t, by degrees of freedom
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)
TAUS = (0.01, 0.1)  # as it comes, and ten times that
ANCHORS = ("behaviour", "proximal")

Figure = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """Which courses of a game are run."""

    game: GameName
    ages: tuple[int, ...]
    seeds: int
    taus: tuple[float, ...]

    def objectives(self, age: int) -> list[Cell]:
        return [Cell(self.game, name, age) for name in OBJECTIVES]

    def without(self, age: int) -> Cell:
        return Cell(self.game, "k25", age, (("tau", 0.0),))

    def regularised(self, age: int) -> list[Cell]:
        return [replace(self.without(age), knobs=(("tau", t), ("anchor", a))) for a in ANCHORS for t in self.taus]

    def cells(self) -> list[Cell]:
        return [c for n in self.ages for c in (*self.objectives(n), self.without(n), *self.regularised(n))]


PLANS: dict[str, Plan] = {
    "toy": Plan("toy", (0, 1, 2, 4, 8), 6, TAUS),
    "nano": Plan("nano", (0, 2, 8), 3, TAUS[:1]),
}


def measure(only: Sequence[str] = ("toy",)) -> dict[str, Any]:
    for name in only:
        if name not in PLANS:
            raise UserError(f"bench staleness: only {name!r}: no such game; use {' or '.join(PLANS)}")
    torch.set_num_threads(1)
    return {name: played(PLANS[name]) for name in only}


def played(plan: Plan) -> dict[str, Any]:
    courses = [(cell, seed) for seed in range(plan.seeds) for cell in plan.cells()]
    found: dict[Cell, list[dict[str, Any]]] = {}
    with progress(f"bench staleness: courses of {plan.game}", len(courses)) as bar:
        for i, (cell, seed) in enumerate(courses, 1):
            found.setdefault(cell, []).append(result(cell, seed))
            bar(i, f"{cell.name}, age {cell.age}: {found[cell][-1]['reward']:.3f}")
    figures = {
        "change": change(plan, found), "rewards": rewards(plan, found), "regulariser": regulariser(plan, found),
        "clipped": {c.name: {**_by_age(plan, found, c, "clipped")} for c in plan.objectives(0)},
        "updates": GAMES[plan.game].updates, "seeds": plan.seeds, "ages": list(plan.ages),
    }  # fmt: skip
    print_tables(plan, figures)
    return figures


Found = Mapping[Cell, Sequence[Mapping[str, Any]]]


def rewards(plan: Plan, found: Found) -> dict[str, dict[str, Figure]]:
    """Reward after the last update: objective -> age -> mean with its interval."""
    return {
        cell.name: {str(n): across(_values(found[replace(cell, age=n)], "reward")) for n in plan.ages}
        for cell in plan.objectives(0)
    }


def change(plan: Plan, found: Found) -> dict[str, Figure]:
    """Reward at the greatest age less reward at age 0, paired by seed."""
    first, last = plan.ages[0], plan.ages[-1]
    return {c.name: paired(found[replace(c, age=last)], found[replace(c, age=first)]) for c in plan.objectives(first)}


def regulariser(plan: Plan, found: Found) -> dict[str, dict[str, Figure]]:
    """Reward with the square less reward without it, paired by seed: knobs -> age -> mean with its interval."""
    return {
        cell.name: {str(n): paired(found[replace(cell, age=n)], found[plan.without(n)]) for n in plan.ages}
        for cell in plan.regularised(0)
    }


def _by_age(plan: Plan, found: Found, cell: Cell, key: str) -> dict[str, float]:
    return {str(n): round(mean(_values(found[replace(cell, age=n)], key)), 4) for n in plan.ages}


def _values(results: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [r[key] for r in results]


def paired(these: Sequence[Mapping[str, Any]], those: Sequence[Mapping[str, Any]]) -> Figure:
    return across([a["reward"] - b["reward"] for a, b in zip(these, those, strict=True)])


def across(values: Sequence[float]) -> Figure:
    """Mean over seeds with its 95% interval."""
    half = STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return {"mean": mean(values), "low": mean(values) - half, "high": mean(values) + half}


# ------------------------------------------------------------------------------------ text


def print_tables(plan: Plan, figures: Mapping[str, Any]) -> None:
    console = Console(stderr=True, width=150, highlight=False)
    for key, title in (("rewards", "reward"), ("regulariser", "reward with tau less reward with tau 0")):
        about = f"{plan.game}: {title} after {figures['updates']} updates, {plan.seeds} seeds, by age of the batches"
        table = Table("objective", *(f"age {n}" for n in plan.ages), title=about)
        for name, by_age in figures[key].items():
            table.add_row(name, *(f"{f['mean']:.3f} [{f['low']:.3f}, {f['high']:.3f}]" for f in by_age.values()))
        console.print(table)
