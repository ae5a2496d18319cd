"""Small hand-made SVG charts: lines, bands, stacked areas, bars, outlines, intervals.

Owns geometry. Colours are CSS classes (`s1`..`s6`, `muted`), so a chart follows the page's light or dark scheme.
Invariant: every chart has the same small natural size (360 x 200), readable one to a row on a phone and three to a row
on a desktop; every label is escaped; at most `scale.POINTS` vertices a line. Refuses nothing: a chart with no points is
an empty frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nonet.report.read import Points
from nonet.report.scale import log_span, log_ticks, padded, percent, short, signed, span, thin, ticks

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 32


@dataclass(frozen=True, slots=True)
class Line:
    points: Points
    css: str
    faint: bool = False
    """Raw data behind a smoothed line."""
    dashed: bool = False
    """A limit beside what was measured."""


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
    frame = Frame(span(xs), log_span(ys) if log else padded(ys, zero), log)
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
    frame = Frame(span(xs), padded(total, True))
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


def pairs(values: Sequence[tuple[str, float, float]], label: str, x_name: str) -> Markup:
    """Two shares side by side for each name, the first muted; few or short names fit."""
    top = max((v for _, a, b in values for v in (a, b)), default=1.0) or 1.0
    frame = Frame((0, max(len(values), 1)), (0, top * 1.08))
    body = [_y_axis(frame, percent), _x_name(x_name)]
    floor = frame.py(0)
    for i, (name, *both) in enumerate(values):
        for value, left, right, css in zip(both, (0.14, 0.5), (0.5, 0.86), ("pair muted", "pair s1"), strict=True):
            x0, x1 = frame.px(i + left), frame.px(i + right)
            body.append(f'<path class="{css}" d="M{x0} {floor}V{frame.py(value)}H{x1}V{floor}Z"/>')
        body.append(f'<text class="mid" x="{frame.px(i + 0.5)}" y="{HEIGHT - BOTTOM + 14}">{escape(name)}</text>')
    body.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
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
    low, high = padded(ends, True, both=True)

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
    css = f"line {curve.css}{' faint' if curve.faint else ''}{' dashed' if curve.dashed else ''}"
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


def _signed_tick(value: float) -> str:
    return short(value) if value <= 0 else "+" + short(value)
