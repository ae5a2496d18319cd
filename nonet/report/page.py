"""The page: sections in order, each from what the run left, put through one template.

Owns the context that `report.html.j2` reads, and the limits that keep the page under 3 MB. Invariant: the result is
ASCII (everything else is a character reference), names no external resource, and its policy header forbids loading
any. Refuses to hide gaps: what was cut, skipped or unreadable is counted in a sentence.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from nonet.report import figures, levels, staleness, trajectories, viewer
from nonet.report.acceptance import acceptance
from nonet.report.headline import headline
from nonet.report.read import Event, RunLog, latest_by, number, printable, read_experts, read_run, text, without_paths
from nonet.report.serving import serving

HERE = Path(__file__).parent
MOST_SAMPLES, SAMPLE_CHARS = 20, 2000
MOST_NOTES, NOTE_CHARS = 60, 600
DUMP_CHARS = 40_000
MOST_SETTINGS = 12
# Settings that a reader looks for first: the last name of a dotted key, in this order.
_KEY_SETTINGS = (
    *("seed", "layers", "hidden", "width", "dim", "vocab", "vocab_size", "steps", "batch", "lr", "fraction", "samples"),
    *("group_size", "temperature", "active", "max_tokens", "kl", "window", "heldout", "experts", "heads", "n"),
    *("domains", "sources", "tasks", "model", "name", "preset"),
)


def render(run_dir: Path) -> str:
    """The whole page as ASCII text."""
    log = read_run(run_dir)
    found = trajectories.scan(run_dir)
    chosen, shown = viewer.embed(trajectories.choose(found))
    script = (HERE / "report.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(HERE, encoding="utf-8"), autoescape=True, trim_blocks=True)
    environment.filters["clean"] = _visible
    page = environment.get_template("report.html.j2").render(
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        trajectories=chosen,
        shown=shown,
        scan=found,
        **_head(log),
        **_training(log, found),
        **_staleness_and_effort([log, *read_experts(run_dir)]),
        **_tail(log),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


# ------------------------------------------------------------------ sections


def _head(log: RunLog) -> dict[str, Any]:
    result = headline(log)
    dump = "" if log.resolved is None else _dump(log.resolved)
    return {
        "name": printable(log.name),
        "began": _date(log.began),
        "latest": _date(log.latest),
        "state": _state(log),
        "settings": key_settings(log.resolved or {}),
        "dump": dump[:DUMP_CHARS],
        "dump_cut": max(0, len(dump) - DUMP_CHARS),
        "bad_events": log.bad_lines,
        "headline": result,
        "forest": figures.interval_panel(result.gains),
        "kept": levels.kept(log),
    }


def _training(log: RunLog, found: trajectories.Scan) -> dict[str, Any]:
    cold = latest_by(log.of("lm_step"), "stage", "step")
    stages = list(dict.fromkeys(text(e, "stage", "cold") for e in cold))[:4]
    rl = latest_by(log.of("rl_step"), "step")
    first, last = found.ends()
    return {
        "cold": [(s, figures.cold_panels(mine), _cold_words(mine)) for s in stages if (mine := _stage(cold, s))],
        "cold_missing": log.why_missing("cold", "learning curve"),
        "rl": figures.rl_panels(rl),
        "rl_steps": len(rl),
        "rl_missing": log.why_missing(log.trains, "RL steps"),
        "lengths": figures.length_panels(found),
        "first": _steps(first),
        "last": _steps(last),
        "versions": figures.version_panels(found),
        "no_trajectories": log.why_missing(log.trains, "trajectories"),
    }


def _staleness_and_effort(logs: list[RunLog]) -> dict[str, Any]:
    """Over the steps of the run and of its experts: none of these figures minds whose step it was."""
    steps = [e for log in logs for e in latest_by(log.of("rl_step"), "step")]
    return {
        "ages": staleness.age_panels(steps),
        "bias": staleness.bias_panels(steps),
        "effort": levels.effort_panels(steps),
        "effort_warnings": levels.effort_warnings(steps),
        "experts": sum(bool(log.of("rl_step")) for log in logs[1:]),
    }


def _tail(log: RunLog) -> dict[str, Any]:
    samples, notes = log.of("sample"), log.of("note")
    return {
        "draft": acceptance(log),
        "served": serving(log),
        "samples": [(_long(e, "prompt"), _long(e, "text")) for e in samples[:MOST_SAMPLES]],
        "samples_cut": max(0, len(samples) - MOST_SAMPLES),
        "samples_missing": log.why_missing("sample", "samples"),
        "stages": list(_stages(log)),
        "notes": [without_paths(_long(e, "text", NOTE_CHARS)) for e in notes[-MOST_NOTES:]],
        "notes_cut": max(0, len(notes) - MOST_NOTES),
    }


def _stage(events: list[Event], stage: str) -> list[Event]:
    return [e for e in events if text(e, "stage", "cold") == stage]


def _cold_words(steps: list[Event]) -> str:
    """Where training ended: step, tokens, loss."""
    last = max(steps, key=lambda e: number(e, "step") or 0.0)
    step, of, tokens, loss = (number(last, k) for k in ("step", "steps", "tokens", "loss"))
    words = [f"Step {step:,.0f}" + (f" of {of:,.0f}" if of else "")] if step is not None else []
    if tokens is not None:
        words.append(f"{tokens:,.0f} tokens")
    if loss is not None:
        words.append(f"next-token loss {loss:.3f} nats")
    return ", ".join(words) + "." if words else ""


def _steps(steps: list[int]) -> str:
    if not steps:
        return "none"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _state(log: RunLog) -> str:
    """One sentence: finished, or which stages are open."""
    status = {name: text(log.stage(name), "status") for name in log.stages if name != "report"}
    open_ = [n for n, s in status.items() if s == "start"]
    waiting = [n for n, s in status.items() if not s]
    if not open_ and not waiting:
        return "All stages have ended."
    words = [f"under way or interrupted: {', '.join(open_)}"] if open_ else []
    words += [f"not started: {', '.join(waiting)}"] if waiting else []
    return f"This run is partial ({'; '.join(words)})."


def _stages(log: RunLog) -> Iterator[tuple[str, str, str, str]]:
    """(name, status, duration, starts) of every stage, expected ones first."""
    named = dict.fromkeys([*log.stages, *(text(e, "name") for e in log.of("stage"))])
    for name in list(named)[:40]:
        mine = [e for e in log.of("stage") if text(e, "name") == name]
        status = {"start": "under way or interrupted", "done": "done", "skipped": "skipped", "": "not started"}
        last = text(mine[-1], "status") if mine else ""
        starts = sum(text(e, "status") == "start" for e in mine)
        seconds = number(mine[-1], "seconds") if mine else None
        word = "writing this page" if (name, last) == ("report", "start") else status.get(last, last)
        yield name, word, "" if seconds is None else _duration(seconds), str(starts) if starts > 1 else ""


def _dump(resolved: dict[str, Any]) -> str:
    return json.dumps(without_paths(resolved), indent=1, sort_keys=True, ensure_ascii=False)


def key_settings(resolved: dict[str, Any]) -> list[tuple[str, str]]:
    """A dozen settings as (dotted key, value): known names first, then whatever comes first."""
    leaves = list(_leaves(without_paths(resolved)))
    order = {name: i for i, name in enumerate(_KEY_SETTINGS)}
    leaves.sort(key=lambda kv: order.get(kv[0].rpartition(".")[2], len(order)))
    return sorted(leaves[:MOST_SETTINGS])


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, str | int | float):
        yield printable(prefix, 60), printable(str(value).lower() if isinstance(value, bool) else str(value), 60)


# ---------------------------------------------------------------------- text


def _date(t: float | None) -> str:
    try:
        return "" if t is None else datetime.fromtimestamp(t, UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    except (ValueError, OverflowError, OSError):
        return ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _long(event: Event, key: str, limit: int = SAMPLE_CHARS) -> str:
    value = event.get(key)
    written = value if isinstance(value, str) else text(event, key)
    return written if len(written) <= limit else written[:limit] + "…"


def _visible(value: str) -> str:
    """Text for a `pre`: newlines and tabs stay, other control and direction characters are spelled out."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
        lambda m: f"\u27e8{ord(m[0]):04X}\u27e9",
        value,
    )
