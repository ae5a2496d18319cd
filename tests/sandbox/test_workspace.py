"""Directories of killed processes are found and deleted; those of living ones are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nonet.sandbox import workspace

LEAVE = """
import os
from nonet.sandbox import LocalSandbox
from nonet.types import SandboxRecipe
box = LocalSandbox(SandboxRecipe({"a": "x"}))
print(box._root, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_deleted(tmp_path: Path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LEAVE], env=environment, capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert done.returncode == -9
    assert (left / "a").read_text() == "x"
    mine = tmp_path / left.name.replace(left.name.split("-")[2], str(os.getpid()))
    other_container = tmp_path / left.name.replace(left.name.split("-")[1], "1")
    for directory in (mine, other_container):
        directory.mkdir()
    workspace.sweep(str(tmp_path))
    assert {entry for entry in tmp_path.iterdir()} == {mine, other_container}


def test_tmpdir_wins_over_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert workspace.base_directory() == str(tmp_path)
