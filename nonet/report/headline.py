"""The headline: held-out reward before and after RL or distillation, with intervals and gains.

Owns the table of `eval` and `gain` events and the sentence above it. Invariant: a gain with an interval comes from a
`gain` event; without one the difference of the two means is shown and called that. Refuses to compute intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nonet.report.read import Event, RunLog, latest_by, number, text
from nonet.report.scale import short, signed
from nonet.report.svg import Interval

BEFORE = "eval-cold"
AFTER = {"rl": "RL", "distill": "distillation", "expert": "RL"}  # what came between, by the stage that trained
MOST_ROWS = 80


@dataclass(frozen=True, slots=True)
class Score:
    """A mean reward and its interval as text; empty strings where nothing was recorded."""

    value: str = ""
    interval: str = ""
    length: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    domain: str
    source: str
    """Empty where the row speaks for the whole domain."""
    mode: str
    n: str
    before: Score
    after: Score
    gain: str
    gain_interval: str
    clear: bool
    """The interval of the gain excludes zero."""


@dataclass(frozen=True, slots=True)
class Headline:
    between: str
    """What lies between the two measurements."""
    rows: list[Row]
    gains: list[Interval]
    sentence: str
    missing: list[str]
    cut: int
    """Rows left out of the table."""


def headline(log: RunLog) -> Headline:
    after = f"eval-{log.trains}"
    found = [
        e for e in latest_by(log.of("eval"), "stage", "domain", "source", "mode") if text(e, "stage") in (BEFORE, after)
    ]
    several = _several(found)
    evals = {_key(e, several): e for e in found}
    told = [g for g in log.of("gain") if text(g, "stage", after) == after]
    gains = {_pair(g): g for g in latest_by(told, "domain", "mode") if number(g, "gain") is not None}
    missing, between = [], AFTER[log.trains]
    for stage, what in ((BEFORE, f"held-out reward before {between}"), (after, f"held-out reward after {between}")):
        if not any(k[0] == stage for k in evals):
            missing.append(log.why_missing(stage, what))
    names = sorted({k[1:] for k in evals} | _bare(evals, gains), key=_order)
    rows = [_row(name, after, evals, gains) for name in names[:MOST_ROWS]]
    marks = [_interval(g) for _, g in sorted(gains.items(), key=lambda kv: (kv[0][0], kv[0][1] != "sampled"))]
    return Headline(between, rows, marks[:MOST_ROWS], _sentence(gains), missing, max(0, len(names) - MOST_ROWS))


Key = tuple[str, str, str, str]
Name = tuple[str, str, str]
Pair = tuple[str, str]


def _several(evals: Iterable[Event]) -> set[str]:
    """Domains measured on more than one source; where there is one, it is the domain."""
    sources: dict[str, set[str]] = {}
    for e in evals:
        sources.setdefault(text(e, "domain", "unnamed"), set()).add(text(e, "source"))
    return {domain for domain, names in sources.items() if len(names) > 1}


def _key(e: Event, several: set[str]) -> Key:
    domain = text(e, "domain", "unnamed")
    source = text(e, "source")
    bare = source == domain or domain not in several
    return text(e, "stage"), domain, "" if bare else source, text(e, "mode", "sampled")


def _pair(g: Event) -> Pair:
    return text(g, "domain", "unnamed"), text(g, "mode", "sampled")


def _bare(evals: Iterable[Key], gains: Iterable[Pair]) -> set[Name]:
    """Rows for gains of domains that have no evaluation row of their own."""
    known = {(domain, mode) for _, domain, source, mode in evals if not source}
    return {(domain, "", mode) for domain, mode in gains if (domain, mode) not in known}


def _order(name: Name) -> tuple[str, bool, bool, str]:
    domain, source, mode = name
    return domain, source != "", mode != "sampled", source


def _row(name: Name, stage: str, evals: dict[Key, Event], gains: dict[Pair, Event]) -> Row:
    """stage: whose measurement is the second."""
    domain, source, mode = name
    before, after = (evals.get((s, *name)) for s in (BEFORE, stage))
    gain = None if source else gains.get((domain, mode))
    shown, interval = _gain(gain, before, after)
    low, high = number(gain, "low"), number(gain, "high")
    clear = low is not None and high is not None and (low > 0 or high < 0)
    counts = [n for e in (before, after, gain) if (n := number(e, "n")) is not None]
    n = " / ".join(dict.fromkeys(f"{c:,.0f}" for c in counts))
    return Row(domain, source, mode, n, _score(before), _score(after), shown, interval, clear)


def _gain(gain: Event | None, before: Event | None, after: Event | None) -> tuple[str, str]:
    if (value := number(gain, "gain")) is not None:
        return signed(value), _range(gain, signed)
    old, new = number(before, "reward"), number(after, "reward")
    return ("", "") if old is None or new is None else (signed(new - old), "difference of means, no interval")


def _score(e: Event | None) -> Score:
    value, length = number(e, "reward"), number(e, "length")
    if value is None:
        return Score()
    return Score(_plain(value), _range(e, _plain), "" if length is None else short(length))


def _plain(value: float) -> str:
    return f"{value:.3f}"


def _range(e: Event | None, write: Callable[[float], str]) -> str:
    low, high = number(e, "low"), number(e, "high")
    return "no interval recorded" if low is None or high is None else f"[{write(low)}, {write(high)}]"


def _interval(g: Event) -> Interval:
    domain, mode = _pair(g)
    name = f"{domain[:11]}, {mode[:8]}"
    return Interval(name, number(g, "gain") or 0.0, number(g, "low"), number(g, "high"), hollow=mode != "sampled")


def _sentence(gains: dict[Pair, Event]) -> str:
    """How many of the gains have intervals that exclude zero, in which direction."""
    if not gains:
        return ""
    ends = [(number(g, "low"), number(g, "high")) for g in gains.values()]
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    up, down = sum(low > 0 for low, _ in known), sum(high < 0 for _, high in known)
    counts = [f"above zero in {up}", f"below zero in {down}", f"across zero in {len(known) - up - down}"]
    if len(known) < len(ends):
        counts.append(f"not recorded in {len(ends) - len(known)}")
    what = f"{len(ends)} comparison{'s' if len(ends) > 1 else ''} of held-out reward"
    return f"{what}: the 95% interval of the gain is {', '.join(counts)}."
