"""The section on serving: held-out tasks over HTTP, without and with the draft. Reads `served` events."""

from __future__ import annotations

from dataclasses import dataclass

from nonet.report.read import Event, RunLog, latest_by, number, table, text

MOST_ROWS = 40


@dataclass(frozen=True, slots=True)
class Row:
    """rewards: (mean, interval) alone and with the draft. stood: share of drafted tokens. Empty where not recorded."""

    domain: str
    mode: str
    tasks: str
    rewards: list[tuple[str, str]]
    stood: str
    speedup: str


def serving(log: RunLog) -> list[Row]:
    return [_row(e) for e in latest_by(log.of("served"), "domain", "mode")[:MOST_ROWS]]


def _row(e: Event) -> Row:
    alone, drafted = table(e, "alone"), table(e, "drafted")
    asked, stood, speedup, n = (number(drafted, "asked"), number(drafted, "stood"), number(e, "speedup"),
                                number(alone, "n"))  # fmt: skip
    return Row(
        text(e, "domain"),
        text(e, "mode"),
        "" if n is None else f"{n:,.0f}",
        [_reward(alone), _reward(drafted)],
        f"{stood / asked:.0%}" if asked and stood is not None else "",
        "" if speedup is None else f"{speedup:.2f}×",
    )


def _reward(f: Event) -> tuple[str, str]:
    value, low, high = (number(f, k) for k in ("reward", "low", "high"))
    if value is None:
        return "", ""
    return f"{value:.3f}", "no interval recorded" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"
