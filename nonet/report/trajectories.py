"""Trajectories: one pass for statistics, then a second, small read of the few that the page shows.

Owns the scan of `trajectories/*.jsonl` and the choice of examples. Invariant: memory holds a short summary per
trajectory, never its tokens, and the choice depends on the files alone (no randomness), so the same run directory
always shows the same trajectories. Refuses to load every token of a long run.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonet.report.read import number, parse, read_lines, text

SHOWN = 120
SCAN_BYTES = 256 << 20
_WIDEST = 6  # trajectories with the most versions that are always shown


@dataclass(frozen=True, slots=True)
class Summary:
    """What the statistics and the choice need to know about one trajectory; `offset` finds it again."""

    file: Path
    offset: int
    key: str
    domain: str
    reward: float | None
    step: int | None
    versions: int
    policy_tokens: int

    @property
    def where(self) -> str:
        """Training step, or the name of the evaluation file."""
        return self.file.stem if self.step is None else f"step {self.step}"

    @property
    def stratum(self) -> tuple[str, str, str]:
        grade = "none" if self.reward is None else "zero" if self.reward <= 0 else "full" if self.reward >= 1 else "mid"
        return self.domain, grade, str(min(self.versions, 3))


@dataclass(slots=True)
class Scan:
    """Statistics over all trajectories read. `age` counts policy tokens by versions behind the newest of their step."""

    items: list[Summary] = field(default_factory=list)
    age: Counter[int] = field(default_factory=Counter)
    bad_lines: int = 0
    files: int = 0
    files_read: int = 0

    @property
    def training(self) -> list[Summary]:
        return [s for s in self.items if s.step is not None]

    def ends(self) -> tuple[list[int], list[int]]:
        """The first and the last tenth of the recorded steps (at least one each; disjoint when there are two)."""
        steps = sorted({s.step for s in self.items if s.step is not None})
        tenth = max(1, len(steps) // 10)
        return steps[:tenth], steps[max(tenth, len(steps) - tenth) :]


def scan(run_dir: Path) -> Scan:
    files = sorted((run_dir / "trajectories").glob("*.jsonl"))
    out = Scan(files=len(files))
    for file in _affordable(files):
        out.files_read += 1
        _scan_file(file, out)
    return out


def _affordable(files: list[Path]) -> list[Path]:
    """All files, or (when they are too much to read) evenly spaced ones that include the first and the last."""
    sizes = []
    for f in files:
        try:
            sizes.append(f.stat().st_size)
        except OSError:
            sizes.append(0)
    if sum(sizes) <= SCAN_BYTES:
        return files
    keep = max(2, int(len(files) * SCAN_BYTES / sum(sizes)))
    return [files[round(i * (len(files) - 1) / (keep - 1))] for i in range(keep)]


def _scan_file(file: Path, out: Scan) -> None:
    written: Counter[int] = Counter()
    for offset, record in read_lines(file):
        segments = policy_segments(record)
        if record is None or segments is None:
            out.bad_lines += 1
            continue
        step = _step(file, record)
        if step is not None:
            for version, pieces in segments:
                written[version] += len(pieces)
        out.items.append(
            Summary(
                file,
                offset,
                key=f"{file.stem}/{text(record, 'id')}",
                domain=text(record, "domain", "unnamed"),
                reward=number(record, "reward"),
                step=step,
                versions=len({v for v, pieces in segments if pieces}),
                policy_tokens=sum(len(pieces) for _, pieces in segments),
            )
        )
    newest = max(written, default=0)
    for version, tokens in written.items():
        out.age[newest - version] += tokens


def _step(file: Path, record: dict[str, Any]) -> int | None:
    """Training step of a record; None for evaluation files, whatever step they name."""
    if not (match := re.fullmatch(r"step-(\d{1,12})", file.stem)):
        return None
    step = number(record, "step")
    return int(match[1]) if step is None else int(step)


def policy_segments(record: dict[str, Any] | None) -> list[tuple[int, list[Any]]] | None:
    """(version, pieces) of each policy segment; None when the record has no readable segments."""
    segments = record.get("segments") if record else None
    if not isinstance(segments, list):
        return None
    out: list[tuple[int, list[Any]]] = []
    for s in segments:
        if not isinstance(s, dict) or not isinstance(s.get("pieces"), list):
            return None
        if s.get("author") == "policy":
            out.append((int(number(s, "version") or 0), s["pieces"]))
    return out


# ----------------------------------------------------------------- choice


def choose(found: Scan, limit: int = SHOWN) -> list[Summary]:
    """At most `limit` trajectories over every domain, reward grade, version count, and first, last and other steps.

    The widest relays come first; the rest is dealt one stratum after another, each stratum in order of a hash.
    """
    widest = sorted((s for s in found.items if s.versions > 1), key=lambda s: (-s.versions, s.key, s.offset))[:_WIDEST]
    chosen = dict.fromkeys(widest[:limit])
    strata: dict[tuple[str, ...], list[Summary]] = {}
    first, last = map(set, found.ends())
    for s in found.items:
        phase = s.file.stem if s.step is None else "first" if s.step in first else "last" if s.step in last else "other"
        strata.setdefault((phase, *s.stratum), []).append(s)
    hands = [sorted(strata[k], key=_shuffle) for k in sorted(strata, key=lambda k: _digest("/".join(k)))]
    for turn in range(limit):
        for hand in hands:
            if turn < len(hand) and len(chosen) < limit:
                chosen.setdefault(hand[turn])
    return sorted(chosen, key=lambda s: (s.step is None, s.step or 0, s.file.stem, s.offset))


def _shuffle(s: Summary) -> tuple[str, int]:
    return _digest(s.key), s.offset


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def load(summary: Summary) -> dict[str, Any] | None:
    """Read one trajectory again; None if the file has changed under us."""
    try:
        with summary.file.open("rb") as f:
            f.seek(summary.offset)
            record = parse(f.readline())
    except OSError:
        return None
    return record if policy_segments(record) is not None else None
