"""Tasks from a JSONL file: one JSON object a line; `fixed` says what it may hold.

Invariant: a mistake is reported as `file:line: field: what to write instead`. Refuses: nothing silently; blank lines
are the only lines without a task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nonet.tasks.fixed import Entry, FixedSource, entry_of
from nonet.types import UserError


def read(path: Path) -> FixedSource:
    """The source in a file; its name is the file's name without the ending."""
    if not path.is_file():
        raise UserError(f"tasks {path}: no such file")
    return FixedSource(path.stem, list(_entries(path)))


def _entries(path: Path) -> Iterator[Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"tasks {path}: is not UTF-8 text ({e.reason} at byte {e.start}); save it as UTF-8") from e
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            item = json.loads(line)
        except json.JSONDecodeError as e:
            raise UserError(f"{where}: not JSON ({e.msg} at column {e.colno}); write one object a line") from e
        yield entry_of(item, where, str(number))
