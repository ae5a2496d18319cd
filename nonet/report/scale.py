"""Numbers on their way to a chart: how they are written, where ticks go, how long series get short.

Owns formatting, ticks, axis ranges, thinning and smoothing. Invariant: thinning keeps extremes, and no function fails
on a short, constant or empty series. Refuses nothing; values are finite before they come here (`read.number`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from nonet.report.read import Points

P = TypeVar("P", bound=tuple[float, ...])
POINTS = 240
"""Most vertices of one line."""


def short(value: float) -> str:
    """A number as an axis shows it: 0.25, 12, 1.5k, 2M, 3e-5."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.001 or size >= 1e9:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}".replace("-", "\u2212")
    for scale, letter in ((1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{value / scale:.3g}{letter}".replace("-", "\u2212")
    return f"{value:.3g}".replace("-", "\u2212")


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign and a fixed number of digits; a true minus sign."""
    written = f"{value:+.{digits}f}"
    return written[1:] if float(written) == 0 else written.replace("-", "\u2212")


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [power * m for m in (0.5, 1, 2, 2.5, 5, 10)]
    coarse = next(i for i, step in enumerate(steps) if step >= raw * 0.999)
    step = next(s for s in (steps[coarse], steps[coarse - 1]) if _multiples(low, high, s) >= 3 or s < raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, first + _multiples(low, high, step))]


def _multiples(low: float, high: float, step: float) -> int:
    return math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], with 2s and 5s (or plain ticks) when there are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**p for p in powers if low <= 10.0**p <= high]
    if len(tens) >= 3:
        return tens[:: math.ceil(len(tens) / 5)]
    finer = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return finer if len(finer) >= 3 else ticks(low, high, 4)


def span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(1.0, abs(low) * 0.01)
    return (low, high) if high > low else (low - room, high + room)


def padded(values: Sequence[float], zero: bool, both: bool = False) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - (room if both or not zero or low < 0 else 0), high + room


def log_span(values: Sequence[float]) -> tuple[float, float]:
    positive = [v for v in values if v > 0]
    low, high = min(positive, default=0.1), max(positive, default=10.0)
    return low / 1.15, high * 1.15


def thin(points: Points, limit: int = POINTS) -> Points:
    """At most about `limit` points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= limit:
        return points
    out: Points = []
    for stretch in _stretches(points, limit // 2):
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        out += sorted(ends)
    return out


def averaged(points: Points, limit: int = POINTS // 2) -> Points:
    """At most `limit` points: the mean of each stretch."""
    if len(points) <= limit:
        return points
    means = [tuple(sum(v) / len(s) for v in zip(*s, strict=True)) for s in _stretches(points, limit)]
    return [(x, y) for x, y in means]


def envelope(points: list[tuple[float, float, float]], limit: int = POINTS // 2) -> list[tuple[float, float, float]]:
    """At most `limit` points (x, low, high): the lowest low and the highest high of each stretch."""
    if len(points) <= limit:
        return points
    return [(s[0][0], min(p[1] for p in s), max(p[2] for p in s)) for s in _stretches(points, limit)]


def _stretches(points: list[P], count: int) -> list[list[P]]:
    cuts = [i * len(points) // count for i in range(count + 1)]
    return [points[a:b] for a, b in pairwise(cuts) if b > a]


def smooth(points: Points) -> tuple[Points, int]:
    """Centred moving mean and its window (a twentieth of the run, odd, at least 3; shorter at the two ends)."""
    reach = max(1, len(points) // 40)
    total = [0.0, *accumulate(y for _, y in points)]
    out = []
    for i, (x, _) in enumerate(points):
        start, end = max(0, i - reach), min(len(points), i + reach + 1)
        out.append((x, (total[end] - total[start]) / (end - start)))
    return out, 2 * reach + 1
