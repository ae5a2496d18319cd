"""Reading a run directory's events and settings without trusting them.

Owns the tolerant JSON-lines reader, the event log by kind, and typed access to fields. Invariant: nothing here
raises on what a file contains; lines that cannot be read are counted and the count reaches the page. Refuses to
guess: a field that is absent, of the wrong type or not finite is None.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Points = list[tuple[float, float]]

_BEGIN, _END = ("tokenizer", "cold", "eval-cold"), ("draft", "serve", "sample", "report")
ONE_RUN = (*_BEGIN, "rl", "eval-rl", *_END)
EXPERTS = (*_BEGIN, "experts", "eval-expert", "distill", "eval-distill", *_END)
# Jobs other than one RL run, by a stage that only they have.
JOBS = {
    "experts": EXPERTS,
    "preflight": ("tokenizer", "preflight", "cold", "eval-cold", "distill", "eval-distill", "report"),
    "expert": ("expert", "eval-expert"),
}
MOST_EXPERTS = 24
_ABSOLUTE = re.compile(r"(?<![\w./:\\])(?:[A-Za-z]:\\|/)(?:[^\s/\\\"'<>|]+[/\\])+([^\s/\\\"'<>|]+)")


@dataclass(slots=True)
class RunLog:
    """What `events.jsonl` and `resolved.json` say; `bad_lines` counts the lines that could not be read."""

    name: str
    resolved: dict[str, Any] | None = None
    events: dict[str, list[Event]] = field(default_factory=dict)
    bad_lines: int = 0
    began: float | None = None
    latest: float | None = None

    def of(self, kind: str) -> list[Event]:
        return self.events.get(kind, [])

    def stage(self, name: str) -> Event | None:
        """The last word about a stage, or None if the log never names it."""
        return next((e for e in reversed(self.of("stage")) if e.get("name") == name), None)

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that a job of this kind has, in order."""
        named = {text(e, "name") for e in self.of("stage")}
        wanted = "experts" if self.resolved is not None and isinstance(self.resolved.get("experts"), dict) else ""
        return next((stages for own, stages in JOBS.items() if own in named or own == wanted), ONE_RUN)

    @property
    def trains(self) -> str:
        """The stage whose RL steps these are."""
        return next(s for s in ("rl", "distill", "expert") if s in self.stages)

    def why_missing(self, stage: str, what: str) -> str:
        """One sentence: which stage would have left `what`, and how far that stage is."""
        last = self.stage(stage)
        status = text(last, "status") if last else ""
        if not last:
            reason = f"the stage “{stage}” has not started"
        elif status == "start":
            reason = f"the stage “{stage}” has started and has not recorded any yet"
        elif status == "skipped":
            reason = f"the stage “{stage}” was skipped"
        else:
            reason = f"the stage “{stage}” ended without recording any"
        return f"No {what}: {reason}."


def read_run(path: Path) -> RunLog:
    log = RunLog(name=path.resolve().name or "run")
    log.resolved = _read_object(path / "resolved.json")
    for _, record in read_lines(path / "events.jsonl"):
        if record is None or not isinstance(record.get("kind"), str):
            log.bad_lines += 1
            continue
        log.events.setdefault(record["kind"], []).append(record)
        if (t := number(record, "t")) is not None:
            log.began = t if log.began is None else min(log.began, t)
            log.latest = t if log.latest is None else max(log.latest, t)
    return log


def read_experts(path: Path) -> list[RunLog]:
    """The logs of the experts that a run trained; each has a run directory of its own inside the run's."""
    return [read_run(folder) for folder in sorted((path / "experts").glob("*/"))[:MOST_EXPERTS]]


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Byte offset and object of each line; None where a line is torn or is not an object. A missing file is empty."""
    try:
        with path.open("rb") as f:
            offset = 0
            for line in f:
                if line.strip():
                    yield offset, parse(line)
                offset += len(line)
    except OSError:
        return


def parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        return parse(path.read_bytes())
    except OSError:
        return None


# ------------------------------------------------------------ typed fields


def number(record: Event | None, key: str) -> float | None:
    """A finite number, or None."""
    value = record.get(key) if record else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    if not math.isfinite(real) or abs(real) > 1e30:
        return None
    return real if abs(real) > 1e-30 else 0.0


def text(record: Event | None, key: str, default: str = "") -> str:
    """A short printable string; numbers are written out, anything else is the default."""
    value = record.get(key) if record else None
    if isinstance(value, str):
        return printable(value)
    return str(value)[:200] if isinstance(value, int | float) and not isinstance(value, bool) else default


def table(record: Event | None, key: str) -> Event:
    """An object field; empty where there is none."""
    value = record.get(key) if record else None
    return value if isinstance(value, dict) else {}


def rows(record: Event | None, key: str, most: int = 200) -> list[Event]:
    """The objects of a list field."""
    value = record.get(key) if record else None
    return [row for row in value[:most] if isinstance(row, dict)] if isinstance(value, list) else []


def printable(value: str, limit: int = 200) -> str:
    """One line without control characters, for labels."""
    clean = "".join(c if c.isprintable() else " " for c in value[:limit])
    return clean + ("…" if len(value) > limit else "")


def latest_by(events: Iterable[Event], *keys: str) -> list[Event]:
    """The last event for every combination of `keys`, in order of first appearance (a resumed run repeats some)."""
    seen: dict[tuple[str, ...], Event] = {}
    for event in events:
        seen[tuple(text(event, k) for k in keys)] = event
    return list(seen.values())


def series(events: Iterable[Event], y: str, x: str = "step") -> Points:
    """Points (x, y) in order of x, each x once (the last event wins)."""
    points: dict[float, float] = {}
    for event in events:
        a, b = number(event, x), number(event, y)
        if a is not None and b is not None:
            points[a] = b
    return sorted(points.items())


def ratio(events: Iterable[Event], over: str, under: str) -> Points:
    """Points (step, over/under) where both are recorded and `under` is positive."""
    shares: list[Event] = []
    for event in events:
        a, b = number(event, over), number(event, under)
        if a is not None and b is not None and b > 0:
            shares.append({"step": event.get("step"), "share": a / b})
    return series(shares, "share")


def without_paths(value: Any, depth: int = 40) -> Any:
    """The same value with absolute file paths cut to their last name: a report travels, machines do not."""
    if isinstance(value, str):
        return _ABSOLUTE.sub(r"…/\1", value)
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {str(k): without_paths(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v, depth - 1) for v in value]
    return value
