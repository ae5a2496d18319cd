"""A run directory: everything a long command leaves behind, and how it finds its way back after `kill -9`.

    resolved.json   the configuration that is in force
    events.jsonl    one line per thing that happened; read by `report`, never by the training code
    checkpoints/    NAME/ directories, each complete or absent (written aside, fsynced, renamed)
    trajectories/   step-000012.jsonl
    report.html

Invariant: a checkpoint directory that exists is whole. `events.jsonl` may end in a torn line after a crash; it is cut
back to the last whole line at the next start, and back to the checkpoint that the run continues from.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nonet.types import UserError


class Run:
    """One run directory. Opening it twice in turn is how a run resumes."""

    def __init__(
        self,
        path: Path | str,
        resolved: Mapping[str, Any] | None = None,
        completed: Callable[[Any], Any] = lambda settings: settings,
    ):
        """completed: fills into stored settings the keys that a newer Nonet has added, at their defaults."""
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._events = self.path / "events.jsonl"
        self._repair_events()
        self._repair_checkpoints()
        if resolved is not None:
            self._settle(resolved, completed)

    def _settle(self, resolved: Mapping[str, Any], completed: Callable[[Any], Any]) -> None:
        """Write resolved.json, or insist that the run being continued had the same configuration."""
        file = self.path / "resolved.json"
        text = json.dumps(resolved, indent=1, sort_keys=True)
        if file.exists() and (old := completed(json.loads(file.read_text()))) != json.loads(text):
            changed = ", ".join(_differences(old, json.loads(text)))
            raise UserError(
                f"run directory {self.path} was started with other settings ({changed}); "
                "give another --out, or delete the directory to start over"
            )
        write_atomic(file, text)

    # ------------------------------------------------------------- events

    def event(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"t": round(time.time(), 3), "kind": kind, **fields})
        with self._events.open("a") as f:
            f.write(line + "\n")

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        if not self._events.exists():
            return
        with self._events.open() as f:
            for line in f:
                record = json.loads(line)
                if kind is None or record["kind"] == kind:
                    yield record

    def rewind(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Drop events of work that a crash undid; called once, before continuing from a checkpoint."""
        kept = [json.dumps(e) + "\n" for e in self.events() if keep(e)]
        write_atomic(self._events, "".join(kept))

    def _repair_events(self) -> None:
        if not self._events.exists():
            return
        data = self._events.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            write_atomic(self._events, whole.decode())

    # -------------------------------------------------------- checkpoints

    def save(self, name: str, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a directory, then make it appear at checkpoints/NAME in one rename."""
        final = self.path / "checkpoints" / name
        partial = final.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        for file in partial.rglob("*"):
            if file.is_file():
                _fsync(file)
        replaced = final.with_name(f".{name}.replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _fsync(final.parent)
        return final

    def _repair_checkpoints(self) -> None:
        """Bring back a checkpoint whose replacement a crash prevented."""
        for replaced in (self.path / "checkpoints").glob(".*.replaced"):
            final = replaced.with_name(replaced.name[1 : -len(".replaced")])
            if not final.exists():
                replaced.rename(final)

    def checkpoints(self, prefix: str) -> list[Path]:
        """Whole checkpoints named PREFIX-NUMBER, oldest first."""
        root = self.path / "checkpoints"
        found = [p for p in root.glob(f"{prefix}-*") if p.is_dir() and p.name[len(prefix) + 1 :].isdigit()]
        return sorted(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))

    def prune(self, prefix: str, keep: int) -> None:
        found = self.checkpoints(prefix)
        for old in found[: max(0, len(found) - keep)]:
            shutil.rmtree(old)

    # ------------------------------------------------------- trajectories

    def write_trajectories(self, name: str, records: list[dict[str, Any]]) -> None:
        folder = self.path / "trajectories"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(r) + "\n" for r in records))


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's text so that a reader (or a crash) sees the old text or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield f"{prefix}: {old!r} -> {new!r}"
