"""The draft's section: acceptance length of the untouched draft and of the tuned one, by domain and mode.

Reads `draft_measured` events. Refuses to compute: lengths, intervals, gains and shares are shown as they were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nonet.report import svg
from nonet.report.figures import Panel
from nonet.report.read import Event, Points, RunLog, latest_by, number, table, text

DRAFTS = ("untouched", "tuned")
MOST_ROWS = 40


@dataclass(frozen=True, slots=True)
class Row:
    """figures: (value, interval) of each draft's length, then of the gain, as text; empty where none was recorded."""

    domain: str
    mode: str
    tasks: str
    drafted: str
    figures: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """missing: a sentence if there is nothing to show; empty where the run has no such stage either."""

    rows: list[Row]
    panels: list[Panel]
    missing: str


def acceptance(log: RunLog) -> Acceptance:
    found = latest_by(log.of("draft_measured"), "domain", "mode")
    wanted = not found and log.stage("draft") is not None
    return Acceptance(
        [_row(e) for e in found[:MOST_ROWS]], _panels(found), log.why_missing("draft", "draft") if wanted else ""
    )


def _row(e: Event) -> Row:
    tasks = number(table(e, "tuned"), "requests")
    shown = [_spread(table(e, name), "length", "") for name in DRAFTS] + [_spread(table(e, "factor"), "ratio", "×")]
    return Row(text(e, "domain"), text(e, "mode"), "" if tasks is None else f"{tasks:,.0f}", text(e, "tokens"), shown)


def _panels(found: Sequence[Event]) -> list[Panel]:
    """Share of drafts by position, over all domains: both modes, both drafts."""
    curves = {
        f"{name}, {text(e, 'mode')}": points
        for e in found
        for name in DRAFTS
        if text(e, "domain") == "all" and (points := _positions(table(e, name)))
    }
    if not curves:
        return []
    drawn = [svg.Line(points, f"s{i}") for i, points in enumerate(curves.values(), 1)]
    spoken = "; ".join(f"{name}: {', '.join(f'{p:.2f}' for _, p in points)}" for name, points in curves.items())
    chart = svg.lines(drawn, f"Share of drafts by position. {spoken}", zero=True, x_name="position k")
    legend = tuple((f"s{i}", name) for i, name in enumerate(curves, 1))
    return [Panel("Acceptance by position", chart, "Share of drafts whose first k tokens all stood.", legend)]


def _positions(f: Event) -> Points:
    shares = f.get("positions")
    if not isinstance(shares, list):
        return []
    numbered = ((float(k), number({"share": share}, "share")) for k, share in enumerate(shares[:64], 1))
    return [(k, share) for k, share in numbered if share is not None]


def _spread(f: Event, key: str, unit: str) -> tuple[str, str]:
    value, low, high = (number(f, k) for k in (key, "low", "high"))
    if value is None:
        return "", ""
    interval = "no interval recorded" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"
    return f"{value:.2f}{unit}", interval
