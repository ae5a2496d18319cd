"""The page of a draft: measured.json and the training's events as one HTML file that opens offline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from nonet.report import svg
from nonet.report.figures import Panel
from nonet.report.read import RunLog, read_run, series
from nonet.run import write_atomic

HERE = Path(__file__).parent


def write(folder: Path) -> Path:
    """FOLDER/report.html, from its measured.json and, where there are any, its events.jsonl."""
    found = json.loads((folder / "measured.json").read_text())
    environment = Environment(loader=FileSystemLoader(HERE, encoding="utf-8"), autoescape=True, trim_blocks=True)
    page = environment.get_template("draft.html.j2").render(
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        name=folder.resolve().name,
        found=found,
        rows=list(_rows(found)),
        panels=[*_acceptance(found), *_training(read_run(folder))],
    )
    out = folder / "report.html"
    write_atomic(out, page.encode("ascii", "xmlcharrefreplace").decode("ascii"))
    return out


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for mode, whole in found["modes"].items():
        yield mode, "all", whole
        yield from ((mode, domain, f) for domain, f in whole["domains"].items())
    yield from (("greedy", f"after {length} tokens", f) for length, f in found["contexts"].items())


def _acceptance(found: Mapping[str, Any]) -> list[Panel]:
    intervals = [
        svg.Interval(f"{mode}, {name}", f["length"], f["low"], f["high"], hollow=name != "all")
        for mode, name, f in _rows(found)
        if f["requests"]
    ]
    curves = [
        (mode, [(float(k), p) for k, p in enumerate(f["positions"], 1)])
        for mode, f in found["modes"].items()
        if f["requests"]
    ]
    out = []
    if intervals:
        chart = svg.intervals(intervals, "acceptance length by mode and domain", "tokens a verifying step")
        out.append(Panel("Acceptance length", chart, "Tokens written a verifying step, the bonus token included."))
    if curves:
        lines = [svg.Line(points, f"s{i}") for i, (_, points) in enumerate(curves, 1)]
        chart = svg.lines(lines, "share of drafts by position", zero=True, x_name="position k")
        legend = tuple((f"s{i}", mode) for i, (mode, _) in enumerate(curves, 1))
        out.append(Panel("By position", chart, "Share of drafts whose first k tokens all stood.", legend))
    return out


def _training(log: RunLog) -> list[Panel]:
    out = []
    for title, kind, key, note in (
        ("Loss", "draft_step", "loss", "Mean over all predictions of a step."),
        (
            "Held-out acceptance",
            "draft_acceptance",
            "length",
            "While training, teacher-forced; the best draft is kept.",
        ),
    ):
        points = series(log.of(kind), key)
        if len(points) > 1:
            out.append(Panel(title, svg.lines([svg.Line(points, "s1")], title), note))
    return out
