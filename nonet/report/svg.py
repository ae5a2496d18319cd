"""Small hand-made SVG charts: lines, bands, stacked areas, bars, outlines, intervals.

Owns geometry and ticks. Colours are CSS classes (`s1`..`s6`, `ink`, `muted`), so a chart follows the page's light or
dark scheme. Invariant: every chart has the same small natural size (360 x 200), readable one to a row on a phone and
three to a row on a desktop; every label is escaped; at most POINTS vertices a line. Refuses nothing: a chart with no
points is an empty frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from markupsafe import Markup, escape

from nonet.report.read import Points

P = TypeVar("P", bound=tuple[float, ...])
WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 32
POINTS = 240


@dataclass(frozen=True, slots=True)
class Line:
    points: Points
    css: str
    faint: bool = False
    """Raw data behind a smoothed line."""


@dataclass(frozen=True, slots=True)
class Band:
    """Area between two lines over the same x."""

    points: list[tuple[float, float, float]]
    css: str


@dataclass(frozen=True, slots=True)
class Frame:
    """Data to pixels. Values outside the frame are drawn at its edge."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def px(self, value: float) -> float:
        return round(LEFT + _unit(value, *self.x) * (WIDTH - LEFT - RIGHT), 1)

    def py(self, value: float) -> float:
        if self.log:
            unit = _unit(math.log(max(value, self.y[0])), math.log(self.y[0]), math.log(self.y[1]))
        else:
            unit = _unit(value, *self.y)
        return round(HEIGHT - BOTTOM - unit * (HEIGHT - TOP - BOTTOM), 1)


def _unit(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


# ------------------------------------------------------------------- charts


def lines(
    curves: Sequence[Line],
    label: str,
    *,
    band: Band | None = None,
    zero: bool = False,
    log: bool = False,
    rule: float | None = None,
    x_name: str = "step",
) -> Markup:
    """Lines over x. `zero` keeps y = 0 in view, `rule` draws a reference line, `log` needs positive values."""
    ys = [y for c in curves for _, y in c.points] + ([rule] if rule is not None else [])
    xs = [x for c in curves for x, _ in c.points]
    if band:
        ys += [v for _, low, high in band.points for v in (low, high)]
        xs += [x for x, _, _ in band.points]
    frame = Frame(_range(xs), _log_range(ys) if log else _padded(ys, zero), log)
    body = [_axes(frame, x_name)]
    if band:
        body.append(_area(frame, band))
    if rule is not None:
        body.append(f'<path class="rule" d="M{LEFT} {frame.py(rule)}H{WIDTH - RIGHT}"/>')
    for curve in sorted(curves, key=lambda c: not c.faint):
        body.append(_line(frame, curve))
    return _svg(body, label)


def stacked(layers: Sequence[tuple[Points, str]], label: str) -> Markup:
    """Areas on top of one another; layers share their x."""
    xs = [x for points, _ in layers[:1] for x, _ in points]
    total = [0.0] * len(xs)
    bands: list[Band] = []
    for points, css in layers:
        upper = [t + y for t, (_, y) in zip(total, points, strict=True)]
        bands.append(Band(list(zip(xs, total, upper, strict=True)), css))
        total = upper
    frame = Frame(_range(xs), _padded(total, True))
    return _svg([_axes(frame, "step"), *(_area(frame, b) for b in bands)], label)


def bars(values: Sequence[tuple[str, float, str]], label: str, x_name: str) -> Markup:
    """One bar for each (name, share, text above the bar); shares are drawn against their maximum."""
    frame = Frame((0, max(len(values), 1)), (0, max((v for _, v, _ in values), default=1.0) * 1.15 or 1.0))
    body = [_y_axis(frame, percent), _x_name(x_name)]
    floor = frame.py(0)
    for i, (name, value, above) in enumerate(values):
        left, right, top = frame.px(i + 0.15), frame.px(i + 0.85), frame.py(value)
        middle = round((left + right) / 2, 1)
        body.append(f'<path class="bar" d="M{left} {floor}V{top}H{right}V{floor}Z"/>')
        body.append(f'<text class="mid value" x="{middle}" y="{top - 4:.1f}">{escape(above)}</text>')
        body.append(f'<text class="mid" x="{middle}" y="{HEIGHT - BOTTOM + 14}">{escape(name)}</text>')
    return _svg(body, label)


def outlines(edges: Sequence[float], shares: Sequence[tuple[Sequence[float], str]], label: str, x_name: str) -> Markup:
    """Histograms over the same bins, drawn as steps: the first filled, the others outlined."""
    top = max((v for s, _ in shares for v in s), default=1.0) or 1.0
    frame = Frame((edges[0], edges[-1]), (0, top * 1.08))
    body = [_y_axis(frame, percent), _x_axis(frame, x_name)]
    for i, (share, css) in enumerate(shares):
        path = f"M{frame.px(edges[0])} {frame.py(0)}"
        for value, right in zip(share, edges[1:], strict=True):
            path += f"V{frame.py(value)}H{frame.px(right)}"
        body.append(f'<path class="{"area" if i == 0 else "line"} {css}" d="{path}V{frame.py(0)}"/>')
    return _svg(body, label)


@dataclass(frozen=True, slots=True)
class Interval:
    """One row of an interval plot; `low` and `high` may be unknown."""

    name: str
    value: float
    low: float | None
    high: float | None
    hollow: bool = False


def intervals(rows: Sequence[Interval], label: str, x_name: str) -> Markup:
    """Estimates with their intervals against zero, one row each."""
    step, left, right = 26, 124, 54
    height = TOP + step * len(rows) + 36
    ends = [0.0, *(v for r in rows for v in (r.value, r.low, r.high) if v is not None)]
    low, high = _padded(ends, True, both=True)

    def px(v: float) -> float:
        return round(left + _unit(v, low, high) * (WIDTH - left - right), 1)

    floor = TOP + step * len(rows)
    body = []
    for tick in ticks(low, high, 4):
        css = "rule" if tick == 0 else "rail"
        body.append(f'<path class="{css}" d="M{px(tick)} {TOP}V{floor}"/>')
        body.append(f'<text class="mid" x="{px(tick)}" y="{floor + 14}">{_signed_tick(tick)}</text>')
    for i, row in enumerate(rows):
        y = TOP + step * i + step // 2
        body.append(f'<text x="0" y="{y + 4}">{escape(row.name)}</text>')
        if row.low is not None and row.high is not None:
            body.append(f'<path class="whisker" d="M{px(row.low)} {y}H{px(row.high)}"/>')
        dot = "dot hollow" if row.hollow else "dot"
        body.append(f'<circle class="{dot}" cx="{px(row.value)}" cy="{y}" r="4.5"/>')
        body.append(f'<text class="end value" x="{WIDTH}" y="{y + 4}">{signed(row.value)}</text>')
    body.append(f'<text class="mid" x="{left + (WIDTH - left - right) / 2}" y="{floor + 31}">{escape(x_name)}</text>')
    return _svg(body, label, height)


# -------------------------------------------------------------------- parts


def _svg(body: Iterable[str], label: str, height: int = HEIGHT) -> Markup:
    inside = "".join(body)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>'
    )


def _line(frame: Frame, curve: Line) -> str:
    points = thin(curve.points)
    css = f"line {curve.css}{' faint' if curve.faint else ''}"
    if len(points) == 1:
        (x, y) = points[0]
        return f'<circle class="point {curve.css}" cx="{frame.px(x)}" cy="{frame.py(y)}" r="3"/>'
    return f'<path class="{css}" d="{_path(frame, points)}"/>' if points else ""


def _area(frame: Frame, band: Band) -> str:
    if not band.points:
        return ""
    upper = _path(frame, [(x, high) for x, _, high in band.points])
    lower = _path(frame, [(x, low) for x, low, _ in reversed(band.points)])
    return f'<path class="area {band.css}" d="{upper}L{lower[1:]}Z"/>'


def _path(frame: Frame, points: Points) -> str:
    return "M" + "L".join(f"{frame.px(x)} {frame.py(y)}" for x, y in points)


def _axes(frame: Frame, x_name: str) -> str:
    return _y_axis(frame, short) + _x_axis(frame, x_name)


def _y_axis(frame: Frame, name: Callable[[float], str]) -> str:
    out = ""
    for tick in log_ticks(*frame.y) if frame.log else ticks(*frame.y, 4):
        y = frame.py(tick)
        out += f'<path class="rail" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        out += f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{name(tick)}</text>'
    return out


def _x_axis(frame: Frame, name: str) -> str:
    floor = HEIGHT - BOTTOM
    out = f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>'
    found = ticks(*frame.x, 5)
    for tick in [t for t in found if t == round(t)] or found:
        x = frame.px(tick)
        css = "end" if x > WIDTH - RIGHT - 8 else "mid"
        out += f'<text class="{css}" x="{WIDTH if css == "end" else x}" y="{floor + 14}">{short(tick)}</text>'
    return out + _x_name(name)


def _x_name(name: str) -> str:
    return f'<text class="mid" x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 3}">{escape(name)}</text>'


# ------------------------------------------------------------------ numbers


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


def _signed_tick(value: float) -> str:
    return short(value) if value <= 0 else "+" + short(value)


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


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(1.0, abs(low) * 0.01)
    return (low, high) if high > low else (low - room, high + room)


def _padded(values: Sequence[float], zero: bool, both: bool = False) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - (room if both or not zero or low < 0 else 0), high + room


def _log_range(values: Sequence[float]) -> tuple[float, float]:
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
