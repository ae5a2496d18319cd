"""Documents out of files: plain text, JSON lines, parquet, directories, globs.

    FILE.jsonl        one document a line, in the field `text`
    FILE.parquet      one document a row, in the column `text` (needs pyarrow)
    any other FILE    one document, UTF-8
    DIRECTORY         its .txt, .md, .jsonl and .parquet files, however deep
    GLOB              what it matches (** crosses folders)
    stdlib            Python's own standard library: real text that is already on every machine

Owns the order of documents: sources as given, files of a source by name, documents as they lie. Refuses, naming the
file, the line and the fix: a source that matches nothing, bytes that are not UTF-8, a record without text.
"""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nonet.types import UserError

IN_A_DIRECTORY = (".txt", ".md", ".jsonl", ".parquet")
_TESTS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "config-3"}


def files(sources: Sequence[str]) -> list[Path]:
    """Every file of the sources, each once, in order."""
    found: dict[Path, None] = {}
    for source in sources:
        matched = _matched(source)
        if not matched:
            raise UserError(f"data {source!r}: matches no file; give a file, a directory, a glob or stdlib")
        found |= dict.fromkeys(matched)
    return list(found)


def _matched(source: str) -> list[Path]:
    if source == "stdlib":
        return standard_library()
    path = Path(source)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix in IN_A_DIRECTORY and p.is_file())
    if path.is_file():
        return [path]
    return sorted(p for p in map(Path, glob.iglob(source, recursive=True)) if p.is_file())  # noqa: PTH207 (** and absolute)


def standard_library() -> list[Path]:
    """The interpreter's own modules in Python, tests left out (some of those are deliberately not UTF-8)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in root.rglob("*.py") if not _TESTS & set(p.relative_to(root).parts))


def documents(file: Path) -> Iterator[str]:
    """The documents of one file, empty ones included (so that a document's index is its place in the file)."""
    if file.suffix == ".jsonl":
        yield from _json_lines(file)
    elif file.suffix == ".parquet":
        yield from _parquet(file)
    else:
        yield _decoded(file.read_bytes(), file, 0)


def _json_lines(file: Path) -> Iterator[str]:
    with file.open("rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(_decoded(line, file, number))
            except ValueError as e:
                raise UserError(f"{file} line {number}: not JSON ({e}); correct or remove the line") from e
            yield _text_of(record, file, number)


def _text_of(record: Any, file: Path, number: int) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{file} line {number}: no field `text` with a string (has {has[:80]}); rename the field")
    return text


def _parquet(file: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports] (an optional extra)
    except ImportError as e:
        raise UserError(f'{file}: reading parquet needs pyarrow; run pip install "nonet[parquet]"') from e
    table = parquet.ParquetFile(file)
    names = table.schema_arrow.names
    if "text" not in names:
        raise UserError(f"{file}: no column `text` (has {', '.join(names)[:80]}); rename the column")
    row = 0
    for batch in table.iter_batches(columns=["text"]):
        for value in batch.column(0).to_pylist():
            row += 1
            if not isinstance(value, str):
                raise UserError(f"{file} row {row}: text = {value!r} is not a string; remove the row")
            yield value


def _decoded(data: bytes, file: Path, line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        where = f"{file} line {line}" if line else str(file)
        raise UserError(f"{where}: not UTF-8 at byte {e.start}; convert it, or leave it out of the data") from e
