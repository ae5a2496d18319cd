"""The park store: an append-only journal of all trajectories that are not yet trained, so that a crash loses none.

Format, version 1. One record a line: the CRC-32 of the JSON in eight hex digits, a space, the JSON, a newline.

    header   format, version, seed, next_group (what was drawn before the file began)
    segment  one run of tokens by one author: id, task_id, group, sample, attempt, seq, author, tokens, logprobs (under
             the sampling transform), raw_logprobs (before it), policy_version, texts, harness (hash), stream and
             position. (seed, stream, position) is the random counter that drew its first token: nothing else is random.
    state    how a trajectory stands: status, stop_reason, sandbox (checkpoint handle), rewards, harness, parent
    release  a group has left the pool: group, why

`write` ends in fsync. A checkpoint holds a `mark`, a file and an offset; what lies beyond it is work that a crash undid
and that is played again, so it is cut off: every group is trained exactly once. A store that is mostly of released
groups is written anew into the next file; the old one goes once a checkpoint names the new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from nonet.types import Segment, Trajectory, UserError

FORMAT, VERSION = "nonet-park", 1
COMPACT_ABOVE = 1 << 20  # bytes; a smaller store is not worth writing anew
_NAME = "store-{:06d}.jsonl"
Extent = tuple[int, int, int]  # attempt, segments, tokens of the last segment


class ParkStore:
    """The writer's end: one folder, one current file, one writer."""

    def __init__(self, folder: Path, seed: int, compact_above: int = COMPACT_ABOVE):
        self.folder, self.seed, self.compact_above = folder, seed, compact_above
        self._number = self._size = self._dead = 0
        self._written: dict[tuple[int, int], Extent] = {}  # by group and sample
        self._bytes: dict[int, int] = {}  # group -> what its records take

    def start(self) -> None:
        """An empty store; what an earlier start left is deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in files(self.folder):
            old.unlink()
        self._begin(1, 0)

    def resume(self, mark: Mapping[str, Any]) -> Parked:
        """Cut the store back to a mark and go on from there. UserError if it does not reach as far."""
        file = self.folder / mark["file"]
        size = file.stat().st_size if file.exists() else 0
        if size < mark["offset"]:
            raise UserError(
                f"{file}: {size} bytes, but the checkpoint needs {mark['offset']}; restore the file, or start a new run"
            )
        for other in files(self.folder):
            if other != file:
                other.unlink()
        os.truncate(file, mark["offset"])
        found = read(file)
        found.undone = size - mark["offset"]
        self._number, self._size = int(file.stem.rpartition("-")[2]), mark["offset"]
        self._written = {(g, t.sample): _extent(t) for g, members in found.held.items() for t in members}
        self._bytes = {g: n for g, n in found.sizes.items() if g in found.held}
        self._dead = self._size - sum(self._bytes.values())
        return found

    def write(self, trajectories: Iterable[Trajectory]) -> None:
        """Append what is new of each, and how each stands; on disk when this returns."""
        lines: list[bytes] = []
        for t in trajectories:
            news = [_line(r) for r in (*self._news(t), _state(t))]
            self._written[t.group, t.sample] = _extent(t)
            self._bytes[t.group] = self._bytes.get(t.group, 0) + sum(map(len, news))
            lines += news
        self._append(lines)
        self._sync()

    def release(self, groups: Sequence[int], why: str) -> None:
        for group in groups:
            self._append([_line({"kind": "release", "group": group, "why": why})])
            self._dead += self._bytes.pop(group, 0)
        self._written = {who: extent for who, extent in self._written.items() if who[0] not in groups}

    def mark(self, next_group: int, held: Mapping[int, Sequence[Trajectory]]) -> dict[str, Any]:
        """What a checkpoint remembers, on disk; compacts first if more than half of the store is dead."""
        if self._size > self.compact_above and self._dead > self._size // 2:
            self._begin(self._number + 1, next_group)
            self.write(t for members in held.values() for t in members)
        self._sync()
        return {"file": self._file.name, "offset": self._size}

    def settle(self) -> None:
        """A checkpoint names the current file: delete the older ones."""
        for other in files(self.folder):
            if other != self._file:
                other.unlink()

    @property
    def _file(self) -> Path:
        return self.folder / _NAME.format(self._number)

    def _begin(self, number: int, next_group: int) -> None:
        self._number, self._size, self._dead, self._written, self._bytes = number, 0, 0, {}, {}
        self._file.unlink(missing_ok=True)
        self._append([_line({"format": FORMAT, "version": VERSION, "seed": self.seed, "next_group": next_group})])
        self._sync()

    def _append(self, lines: Sequence[bytes]) -> None:
        with self._file.open("ab") as f:
            self._size += f.write(b"".join(lines))

    def _sync(self) -> None:
        for path in (self._file, self.folder):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _news(self, t: Trajectory) -> Iterator[dict[str, Any]]:
        """Segment records of what is not yet in the store; the last one there may have grown since."""
        attempt, count, partial = self._written.get((t.group, t.sample), (-1, 0, 0))
        if attempt != t.attempt:
            count = partial = 0
        position = 0
        for seq, s in enumerate(t.segments):
            known = len(s.tokens) if seq < count - 1 else partial if seq == count - 1 else 0
            if known < len(s.tokens) or seq >= count:
                yield _segment(t, seq, position + known, s, known)
            position += len(s.tokens)


@dataclass
class Parked:
    """What a store says. held: groups in the pool, members by sample; released: why a group left; gone: its members,
    until the store is compacted; sizes: bytes a group's records take; torn: bytes of a last record that was cut short;
    undone: bytes after the checkpoint's mark.
    """

    seed: int
    next_group: int
    held: dict[int, list[Trajectory]] = field(default_factory=dict)
    released: dict[int, str] = field(default_factory=dict)
    gone: dict[int, list[Trajectory]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    torn: int = 0
    undone: int = 0

    def _member(self, record: Mapping[str, Any]) -> Trajectory:
        """The trajectory a record is about, at the attempt it is about."""
        members = self.held.setdefault(record["group"], [])
        self.next_group = max(self.next_group, record["group"] + 1)
        found = next((t for t in members if t.sample == record["sample"]), None)
        if found is None:
            found = Trajectory(record["task_id"], record["group"], record["sample"])
            members.append(found)
            members.sort(key=lambda t: t.sample)
        if found.attempt != record["attempt"]:
            found.attempt, found.segments = record["attempt"], []
        return found

    def _take(self, record: Mapping[str, Any], size: int) -> None:
        group = record["group"]
        self.sizes[group] = self.sizes.get(group, 0) + size
        if record["kind"] == "release":
            self.released[group], self.gone[group] = record["why"], self.held.pop(group)
        elif record["kind"] == "segment":
            numbers = {name: tuple(record[name]) for name in ("tokens", "logprobs", "raw_logprobs", "texts")}
            version = record["policy_version"]
            self._member(record).append(Segment(record["author"], policy_version=version, **numbers))
        else:
            member = self._member(record)
            for name in _STANDING:
                setattr(member, name, record[name])


_STANDING = ("status", "stop_reason", "sandbox", "rewards", "harness", "parent")


def files(folder: Path) -> list[Path]:
    """The files of a store, oldest first."""
    return sorted(folder.glob(_NAME.replace("{:06d}", "*")))


def read(file: Path) -> Parked:
    """Everything a file says. A torn last record is left out and counted; UserError for any other damage and for
    formats this version does not know.
    """
    *lines, tail = file.read_bytes().split(b"\n")
    torn = len(tail)
    if lines and _json(lines[-1]) is None:
        torn += len(lines.pop()) + 1
    header = (_json(lines[0]) if lines else None) or {}
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise UserError(
            f"{file}: a park store of format {header.get('format')!r}, version {header.get('version')!r}; this Nonet "
            f"reads {FORMAT!r}, version {VERSION}: use the Nonet that wrote it, or start a new run"
        )
    found = Parked(header["seed"], header["next_group"], torn=torn)
    for number, line in enumerate(lines[1:], 2):
        record = _json(line)
        if record is None:
            raise UserError(f"{file}: line {number} is damaged, and others follow it; restore the file from a backup")
        found._take(record, len(line) + 1)
    return found


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _json(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is not as it was written."""
    check, _, text = line.partition(b" ")
    return json.loads(text) if check == b"%08x" % crc32(text) else None


def _extent(t: Trajectory) -> Extent:
    return t.attempt, len(t.segments), len(t.segments[-1].tokens) if t.segments else 0


def _about(t: Trajectory, kind: str) -> dict[str, Any]:
    return {
        "kind": kind, "id": t.id, "task_id": t.task_id, "group": t.group, "sample": t.sample, "attempt": t.attempt,
    }  # fmt: skip


def _state(t: Trajectory) -> dict[str, Any]:
    return {**_about(t, "state"), **{name: getattr(t, name) for name in _STANDING}}


def _segment(t: Trajectory, seq: int, position: int, s: Segment, start: int) -> dict[str, Any]:
    if start:
        s = replace(s, tokens=s.tokens[start:], logprobs=s.logprobs[start:], raw_logprobs=s.raw_logprobs[start:])
    return {
        **_about(t, "segment"), "seq": seq, "author": s.author, "tokens": s.tokens, "logprobs": s.logprobs,
        "raw_logprobs": s.raw_logprobs, "policy_version": s.policy_version, "texts": s.texts, "harness": t.harness,
        "stream": t.stream, "position": position,
    }  # fmt: skip
