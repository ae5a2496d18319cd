"""docs/tasks.md does what it says: its files are written, its Python runs, its `nonet` lines are left alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "tasks.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tutorial_runs(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)
    blocks = BLOCK.findall(DOCUMENT.read_text())
    assert {language for language, _, _ in blocks} == {"console", "jsonl", "python"}
    names: dict[str, object] = {}
    try:
        for language, file, text in blocks:
            if file:
                Path(file).write_text(text)
            elif language == "python":
                exec(compile(text, "docs/tasks.md", "exec"), names)
    finally:
        sys.modules.pop("my_pkg", None)
    assert Path("my_tasks.jsonl").is_file()
    assert Path("my_pkg.py").is_file()


def test_the_error_it_quotes_is_the_error_it_gives(tmp_path: Path, monkeypatch):
    import pytest

    from nonet.tasks import load
    from nonet.types import UserError

    monkeypatch.chdir(tmp_path)
    Path("my_tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c", "tols": []}\n')
    quoted = re.search(r"`(my_tasks\.jsonl:3: .*?)`", DOCUMENT.read_text())
    assert quoted
    with pytest.raises(UserError, match=re.escape(quoted[1])):
        load("my_tasks.jsonl")
