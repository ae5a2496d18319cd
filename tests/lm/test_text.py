"""Documents out of files: every kind, their order, and every way a source can be wrong."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nonet.lm import text
from nonet.types import UserError


def read(*sources: str) -> list[str]:
    return [d for f in text.files(sources) for d in text.documents(f)]


def lines(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_a_text_file_is_one_document_and_a_json_line_is_one(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    lines(tmp_path / "b.jsonl", {"text": "three", "id": 7}, {"text": "fo\u00fcr"})
    assert read(str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")) == ["one\n\ntwo\n", "three", "fo\u00fcr"]


def test_a_directory_gives_its_texts_by_name_however_deep_and_nothing_else(tmp_path):
    for name in ("b.txt", "a/z.md", "c.bin", "a/y.txt", "program.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path)) == ["a/y.txt", "a/z.md", "b.txt"]


def test_a_glob_gives_what_it_matches_whatever_the_suffix(tmp_path):
    for name in ("a.py", "deep/b.py", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path / "**" / "*.py")) == ["a.py", "deep/b.py"]


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("once")
    assert read(str(tmp_path), str(tmp_path / "a.txt"), str(tmp_path / "*.txt")) == ["once"]


def test_the_standard_library_is_plain_text_without_its_tests():
    found = text.standard_library()
    assert len(found) > 100
    assert any(f.name == "dataclasses.py" for f in found)
    assert not any("test" in f.parts or "site-packages" in f.parts for f in found)
    assert all(isinstance(next(text.documents(f)), str) for f in found)  # all of it is UTF-8


def test_parquet_gives_its_text_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="reading parquet needs pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["x", "", "y\u00e9"]}), file, row_group_size=2)
    assert read(str(file)) == ["x", "", "y\u00e9"]
    parquet.write_table(pyarrow.table({"body": ["x"]}), file)
    with pytest.raises(UserError, match=r"no column `text` \(has body\)"):
        read(str(file))
    parquet.write_table(pyarrow.table({"text": ["x", None]}), file)
    with pytest.raises(UserError, match="row 2: text = None"):
        read(str(file))


def test_without_pyarrow_parquet_says_what_to_install(tmp_path, monkeypatch):
    if find_spec("pyarrow"):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r'needs pyarrow; run pip install "nonet\[parquet\]"'):
        read(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"good\xff", r"a\.txt: not UTF-8 at byte 4; convert it"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl line 2: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl line 1: not UTF-8 at byte 10"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"a\.jsonl line 1: no field `text` with a string \(has body, id\)"),
        ("a.jsonl", b'\n{"text": 3}\n', r"a\.jsonl line 2: no field `text`"),
        ("a.jsonl", b'"just a string"\n', r"a\.jsonl line 1: no field `text` with a string \(has str\)"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        read(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["missing.txt", "*.nothing", "empty"])
def test_a_source_that_matches_nothing_is_named(tmp_path, source):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="matches no file; give a file, a directory, a glob or stdlib"):
        text.files([str(tmp_path / source)])
