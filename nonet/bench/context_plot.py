"""The picture of the context experiment: recall by length, one panel a stage, one line a variant. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = ("#1f6fb4", "#d9542b", "#3a9a4b", "#8a55b0", "#b08a1e", "#4f4f4f", "#c2498b", "#2aa7a7")
PANEL, HEIGHT, LEFT, TOP, BOTTOM, GAP = 250, 200, 40, 34, 40, 16


def write(recall: Mapping[str, Mapping[str, float]], contexts: Sequence[int], file: Path) -> Path:
    """recall: "VARIANT, after CONTEXT" -> length -> share recalled, as `context.summary` has it."""
    file.write_text(svg(recall, contexts))
    return file


def svg(recall: Mapping[str, Mapping[str, float]], contexts: Sequence[int]) -> str:
    variants = list(dict.fromkeys(name.partition(",")[0] for name in recall))
    colour = dict(zip(variants, COLOURS, strict=False))
    width = LEFT + len(contexts) * (PANEL + GAP)
    height = TOP + HEIGHT + BOTTOM + 18 * len(variants)
    parts = [_panel(recall, c, LEFT + i * (PANEL + GAP), colour) for i, c in enumerate(contexts)]
    for i, variant in enumerate(variants):
        y = TOP + HEIGHT + BOTTOM + 18 * i
        parts.append(f'<path d="M{LEFT} {y - 4}h18" stroke="{colour[variant]}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{y}">{escape(variant.replace("_", " "))}</text>')
    style = "text{font:11px sans-serif;fill:#666}path{fill:none}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Share of hidden pairs recalled, by length"><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def _panel(recall: Mapping[str, Mapping[str, float]], context: int, left: float, colour: Mapping[str, str]) -> str:
    floor = TOP + HEIGHT
    curves = {name: points for name, points in recall.items() if name.endswith(f", after {context}")}
    lengths = sorted({int(n) for points in curves.values() for n in points})
    out = [f'<text x="{left}" y="{TOP - 14}">pairs recalled, trained at {context}</text>']
    for tick in (0, 0.5, 1):
        y = floor - tick * HEIGHT
        out.append(f'<path d="M{left} {y}h{PANEL}" stroke="#ccc"/>')
        if left == LEFT:
            out.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    if not lengths:
        return "".join(out)
    spread = max(1.0, math.log2(lengths[-1] / lengths[0]))

    def x(length: int) -> float:
        return round(left + 14 + math.log2(length / lengths[0]) / spread * (PANEL - 28), 1)

    out += [f'<text x="{x(n)}" y="{floor + 16}" text-anchor="middle">{n}</text>' for n in lengths]
    for name, points in curves.items():
        line = "L".join(f"{x(int(n))} {round(floor - v * HEIGHT, 1)}" for n, v in points.items())
        out.append(f'<path d="M{line}" stroke="{colour[name.partition(",")[0]]}" stroke-width="2"/>')
    return "".join(out)
