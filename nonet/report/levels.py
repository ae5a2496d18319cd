"""Reasoning effort: what each level wrote and earned while it was trained, and what merging nine experts kept.

Reads `effort` of `rl_step` events, and `cell`, `retention` and `separation` events. Refuses to compute: retentions,
intervals and verdicts are shown as they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nonet.report import scale, svg
from nonet.report.figures import COLOURS, Panel, curves
from nonet.report.read import Event, Points, RunLog, latest_by, number, printable, rows, table, text

LEVELS = ("low", "high", "max")
MOST_DOMAINS = 6


# --------------------------------------------------------------- over steps


def effort_panels(steps: list[Event]) -> list[Panel]:
    """For each domain: tokens (with the budget dashed) and reward by level; then the share over budget of all cells."""
    found = _cells(steps)
    domains = list(dict.fromkeys(domain for domain, _ in found))[:MOST_DOMAINS]
    out: list[Panel] = []
    for domain in domains:
        mine = {level: found[domain, level] for level in LEVELS if (domain, level) in found}
        out += _by_level(f"{domain}: tokens by level", _TOKENS, mine, "tokens", limit=True)
        out += _by_level(f"{domain}: reward by level", _REWARD, mine, "task_reward")
        out += _by_level(f"{domain}: dead groups by level", _DEAD, mine, "dead")
    over = {f"{d} {e}": _series(events, "over") for (d, e), events in found.items() if _limited(events)}
    trapped = {f"{d} {e}": _series(events, "trapped") for (d, e), events in found.items()}
    seen = [(name, points) for name, points in trapped.items() if any(share for _, share in points)]
    out += curves("Over budget", _OVER, list(over.items()), zero=True)
    return out + curves("Groups wholly over budget", _TRAPPED, seen, zero=True)


_TOKENS = "Mean tokens that the budget counts. Bold: moving mean; faint: every step; dashed: the mean budget."
_REWARD = "The tasks' own mean reward, before the budget's rule. Bold: moving mean; faint: every step."
_DEAD = "Share of groups whose rewards, after the budget's rule, were all equal. Bold: moving mean; faint: every step."
_OVER = "Share of attempts that wrote more than their budget."
_TRAPPED = "Share of groups in which every attempt did; there only the shortest keep their own reward."


def effort_warnings(steps: list[Event]) -> list[str]:
    """The last sentence about each cell, with how many steps had one."""
    last: dict[str, str] = {}
    count: dict[str, int] = {}
    for step in steps:
        sentences = step.get("effort_warnings")
        for sentence in sentences[:20] if isinstance(sentences, list) else ():
            if isinstance(sentence, str):
                cell = printable(sentence.partition(": ")[0], 60)
                last[cell], count[cell] = printable(sentence, 300), count.get(cell, 0) + 1
    return [f"{sentence} (so in {count[cell]} of {len(steps)} steps)." for cell, sentence in list(last.items())[:12]]


def _cells(steps: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """Rows of each (domain, level) with their step."""
    out: dict[tuple[str, str], list[Event]] = {}
    for step in steps:
        for row in rows(step, "effort"):
            key = printable(text(row, "domain", "unnamed"), 24), text(row, "effort")
            out.setdefault(key, []).append({**row, "step": step.get("step")})
    return dict(sorted(out.items(), key=lambda kv: (kv[0][0], _rank(kv[0][1]))))


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _series(events: list[Event], key: str) -> Points:
    found = {number(e, "step"): number(e, key) for e in events}
    return sorted((x, y) for x, y in found.items() if x is not None and y is not None)


def _limited(events: list[Event]) -> bool:
    return any(number(e, "limit") is not None for e in events)


def _by_level(title: str, note: str, levels: dict[str, list[Event]], key: str, limit: bool = False) -> list[Panel]:
    """As `curves`, a level having the same colour everywhere, whichever others there are; limits dashed."""
    named = [(level, _series(events, key)) for level, events in levels.items()]
    shown = [(COLOURS[_rank(level)], level, points) for level, points in named if points]
    if not shown:
        return []
    drawn = [svg.Line(scale.smooth(points)[0], css) for css, _, points in shown]
    drawn += [svg.Line(points, css, faint=True) for css, _, points in shown]
    if limit:
        limits = [(COLOURS[_rank(level)], _series(events, "limit")) for level, events in levels.items()]
        drawn += [svg.Line(points, css, dashed=True) for css, points in limits if len(points) > 1]
    spoken = "; ".join(f"{name} {scale.short(p[0][1])} first, {scale.short(p[-1][1])} last" for _, name, p in shown)
    chart = svg.lines(drawn, f"{title}. {spoken}", zero=limit)
    return [Panel(title, chart, note, tuple((css, level) for css, level, _ in shown))]


# ---------------------------------------------------------------- retention


@dataclass(frozen=True, slots=True)
class Cell:
    """One domain at one level, as text. means: cold, expert, merged; empty strings where nothing was recorded."""

    share: str = ""
    interval: str = ""
    means: tuple[str, str, str] = ("", "", "")
    tokens: tuple[str, str, str] = ("", "", "")
    clear: bool = True
    """The expert's gain has an interval above zero, so that its retention means something."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One table a mode: rows of (domain, a cell for each of `levels`). mean: a sentence; empty where none is known."""

    mode: str
    levels: list[str]
    table: list[tuple[str, list[Cell]]]
    mean: str
    separated: list[str] = field(default_factory=list)


MODELS = ("cold", "expert", "merged")


def kept(log: RunLog) -> list[Kept]:
    told = latest_by(log.of("retention"), "domain", "effort", "mode")
    cells = {tuple(text(e, k) for k in ("model", "domain", "effort", "mode")): e for e in log.of("cell")}
    modes = list(dict.fromkeys([*(text(e, "mode") for e in told), *(key[3] for key in cells)]))[:4]
    return [_kept(log, mode, [e for e in told if text(e, "mode") == mode], cells) for mode in modes]


def _kept(log: RunLog, mode: str, told: list[Event], cells: dict[tuple[str, ...], Event]) -> Kept:
    shares = {(text(e, "domain"), text(e, "effort")): e for e in told}
    mean = shares.pop(("all", ""), None)
    names = [*shares, *((domain, effort) for _, domain, effort, m in cells if m == mode)]
    domains = sorted({domain for domain, _ in names})[:MOST_DOMAINS]
    levels = sorted({effort for _, effort in names}, key=_rank)[: len(LEVELS) + 1]
    out = [
        (domain, [_cell(shares.get((domain, e)), [cells.get((m, domain, e, mode)) for m in MODELS]) for e in levels])
        for domain in domains
    ]
    parted = [e for e in latest_by(log.of("separation"), "domain", "model", "mode") if text(e, "mode") == mode]
    return Kept(mode, levels, out, _mean(mean), [_separated(e) for e in parted[:12]])


def _cell(share: Event | None, measured: list[Event | None]) -> Cell:
    def shown(read: Callable[[int], float | None], write: Callable[[float], str]) -> tuple[str, str, str]:
        a, b, c = ("" if (value := read(i)) is None else write(value) for i in range(3))
        return a, b, c

    def reward(i: int) -> float | None:
        own = number(measured[i], "reward")
        return number(share, MODELS[i]) if own is None else own

    means = shown(reward, lambda v: f"{v:.3f}")
    tokens = shown(lambda i: number(measured[i], "tokens"), scale.short)
    value, gain_low = number(share, "retention"), number(share, "gain_low")
    return Cell("" if value is None else _percent(value), _ends(share) if value is not None else "", means, tokens,
                gain_low is not None and gain_low > 0)  # fmt: skip


def _ends(e: Event | None) -> str:
    low, high = ("?" if (v := number(e, k)) is None else _percent(v) for k in ("low", "high"))
    return f"[{low}, {high}]"


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("-", "\u2212")


def _mean(e: Event | None) -> str:
    value = number(e, "retention")
    return "" if value is None else f"Mean retention over the cells: {_percent(value)} {_ends(e)}."


def _separated(e: Event) -> str:
    """Whose levels, their T, and whether the intervals are disjoint."""
    means = [(level, rows_[0]) for level in LEVELS if (rows_ := _three(table(e, "tokens"), level))]
    words = f"{text(e, 'domain')}, {text(e, 'model', 'merged')} model: " if text(e, "domain") else ""
    words += ", ".join(f"{level} {scale.short(mean)}" for level, mean in means) + " tokens; the intervals "
    words += "do not overlap" if e.get("separated") is True else "overlap, or are out of order"
    share = number(e, "share")
    return words + ("." if share is None else f"; low writes {share:.0%} of max.")


def _three(record: Event, level: str) -> list[float]:
    """[mean, low, high], or nothing."""
    value = record.get(level)
    numbers = [number({"v": v}, "v") for v in value[:3]] if isinstance(value, list) else []
    known = [n for n in numbers if n is not None]
    return known if len(known) == 3 else []
