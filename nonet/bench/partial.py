"""Groups trained per unit of time by pause fraction, over synchronous RL: a scripted heavy tail, and the nano policy.

The whole loop runs: pool, park store, engine, re-prefill after every update, learner. Every fraction trains the same
number of groups, from the same start, in three seeds. Two kinds of work:

    tail   a policy whose lengths are scripted: log-normal, sigma 1, at most 16 times the median
    nano   recipes/nano-rl.toml after its cold start (quick profile), its own lengths, its three domains

Three clocks tell the time from the same runs, since no decision depends on it:

    accelerator   counted. A decode step is one tick, however many rows it has, as where reading the weights bounds it;
                  prompt tokens take 1/PREFILL tick each; an update takes UPDATE ticks, however small its batch
    busy update   the same, but updates take 30% of synchronous time, in proportion to trained tokens
    wall, cpu     seconds of this machine, whose decode step costs in proportion to its rows: here there is little to
                  gain, and the figure says what partial rollouts cost

Results are kept under runs/bench-partial; a bench that was stopped continues. --only: tail, nano; short: one seed and
fewer groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nonet.bench.partial_lab import FULL, KINDS, SHORT, Cell, Point, result
from nonet.progress import progress
from nonet.types import UserError

FRACTIONS = (1.0, 0.95, 0.9, 0.75, 0.5)
SEEDS = (0, 1, 2)
PREFILL = 512.0  # prompt tokens a tick: 20,000 a second beside steps of 25 ms
UPDATE = 4.0  # ticks: a quarter of the scripted median
BUSY = 0.3  # share of synchronous time, under "busy update"
STUDENT = 4.303  # 97.5% of Student's t, two degrees of freedom: three seeds
CLOCKS = ("accelerator", "busy update", "wall", "cpu")
PARTS = (*KINDS, "short")

Curve = Sequence[tuple[float, float]]


def measure(only: Sequence[str] = ()) -> dict[str, Any]:
    if unknown := [part for part in only if part not in PARTS]:
        raise UserError(f"bench partial: only {','.join(unknown)!r}: no such part; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if kind in only] or list(KINDS)
    scale, seeds = (SHORT, SEEDS[:1]) if "short" in only else (FULL, SEEDS)
    cells = [Cell(kind, fraction, seed, scale) for kind in kinds for seed in seeds for fraction in FRACTIONS]
    with progress("bench partial: runs", len(cells)) as bar:
        points = {}
        for i, cell in enumerate(cells, 1):
            points[cell] = result(cell)
            bar(i, cell.name)
    found = {kind: of_kind([c for c in cells if c.kind == kind], points, seeds) for kind in kinds}
    print_tables(found)
    first = found[kinds[0]]
    return {
        "groups_per_time": first["groups_per_time"][CLOCKS[0]], **found,
        "clock": {"prefill_tokens_per_tick": PREFILL, "update_ticks": UPDATE, "busy_update_share": BUSY},
        "seeds": len(seeds), "groups_trained": scale.rounds * scale.groups, "samples": scale.samples,
    }  # fmt: skip


def of_kind(cells: Sequence[Cell], points: Mapping[Cell, list[Point]], seeds: Sequence[int]) -> dict[str, Any]:
    """By fraction: groups per time over synchronous on every clock, staleness, and reward at equal time."""
    speed: dict[str, dict[str, Any]] = {clock: {} for clock in CLOCKS}
    reward: dict[str, dict[str, Any]] = {clock: {} for clock in (CLOCKS[0], "wall")}
    staleness: dict[str, Any] = {}
    at = {(c.fraction, c.seed): c for c in cells}
    for fraction in FRACTIONS:
        pairs = [(points[at[fraction, s]], points[at[1.0, s]]) for s in seeds]
        for clock in CLOCKS:
            ratios = [rate(a, clock, b) / rate(b, clock, b) for a, b in pairs]
            speed[clock][str(fraction)] = across(ratios)
        for clock, table in reward.items():
            table[str(fraction)] = equal_time([curves(a, b, clock) for a, b in pairs])
        staleness[str(fraction)] = {
            "mean": mean(weighted(a, "age_mean") for a, _ in pairs),
            "max": max(p["age_max"] for a, _ in pairs for p in a),
        }
    return {"groups_per_time": speed, "staleness": staleness, "reward_at_equal_time": reward}


def weighted(points: Sequence[Point], name: str) -> float:
    groups = sum(p["groups"] for p in points)
    return sum(p[name] * p["groups"] for p in points) / groups


# ------------------------------------------------------------------------------------ clocks


def ticks(points: Sequence[Point], clock: str, synchronous: Sequence[Point]) -> list[float]:
    """Time each iteration took on a clock."""
    if clock in ("wall", "cpu"):
        return [p[clock] for p in points]
    if clock == "accelerator":
        return [played(p) + UPDATE for p in points]
    rollout, tokens = mean(map(played, synchronous)), mean(p["trained_tokens"] for p in synchronous)
    tick = BUSY / (1 - BUSY) * rollout / tokens
    return [played(p) + p["trained_tokens"] * tick for p in points]


def played(p: Point) -> float:
    """Ticks of a rollout."""
    return p["decode_steps"] + p["prefilled"] / PREFILL


def rate(points: Sequence[Point], clock: str, synchronous: Sequence[Point]) -> float:
    return sum(p["groups"] for p in points) / sum(ticks(points, clock, synchronous))


def curves(points: Sequence[Point], synchronous: Sequence[Point], clock: str) -> tuple[Curve, Curve]:
    """(time, reward) of both, at the end of every iteration that has a reward."""
    return timed(points, ticks(points, clock, synchronous)), timed(synchronous, ticks(synchronous, clock, synchronous))


def timed(points: Sequence[Point], took: Sequence[float]) -> Curve:
    out, now = [], 0.0
    for p, t in zip(points, took, strict=True):
        now += t
        if p["reward"] is not None:
            out.append((now, p["reward"]))
    return out


def equal_time(pairs: Sequence[tuple[Curve, Curve]]) -> dict[str, Any]:
    """Reward minus synchronous reward at quarters of the time that the faster of the two took, mean over seeds."""
    out = {}
    for quarter in (0.25, 0.5, 0.75, 1.0):
        gains, rewards = [], []
        for a, b in pairs:
            now = quarter * min(a[-1][0], b[-1][0])
            rewards.append(smooth(a, now))
            gains.append(rewards[-1] - smooth(b, now))
        out[str(quarter)] = {"reward": mean(rewards), "over synchronous": across(gains)}
    return out


def smooth(curve: Curve, now: float, width: int = 3) -> float:
    """Mean of the last few rewards known at a time; before the first one, that one."""
    known = [reward for time, reward in curve if time <= now]
    return mean(known[-width:]) if known else curve[0][1]


def across(values: Sequence[float]) -> dict[str, float]:
    """Mean over seeds, with its 95% interval (Student's t) where there are three."""
    if len(values) != len(SEEDS):
        return {"mean": mean(values)}
    half = STUDENT * stdev(values) / math.sqrt(len(values))
    return {"mean": mean(values), "low": mean(values) - half, "high": mean(values) + half}


def print_tables(found: Mapping[str, Any]) -> None:
    console = Console(stderr=True, width=130, highlight=False)
    for kind, f in found.items():
        table = Table(
            "fraction", *CLOCKS, "age mean", "age max", "reward, equal time", title=f"{kind}: groups per time"
        )
        for fraction in map(str, FRACTIONS):
            speeds = [f"{f['groups_per_time'][clock][fraction]['mean']:.2f}x" for clock in CLOCKS]
            age, last = f["staleness"][fraction], f["reward_at_equal_time"][CLOCKS[0]][fraction]["1.0"]
            reward = f"{last['reward']:.3f} ({last['over synchronous']['mean']:+.3f})"
            table.add_row(fraction, *speeds, f"{age['mean']:.2f}", str(age["max"]), reward)
        console.print(table)
