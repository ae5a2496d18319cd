"""Building and choosing the native library: levels, switches, refusals, and what happens without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nonet import native
from nonet.types import UserError

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler (cc or gcc) on the PATH")


@pytest.fixture
def asked(monkeypatch) -> Iterator[Callable[[str], None]]:
    """Sets NONET_NATIVE for this process as if it had just begun; undone afterwards."""

    def ask(value: str) -> None:
        monkeypatch.setenv("NONET_NATIVE", value)
        native.forget()

    yield ask
    monkeypatch.undo()
    native.forget()


ASK = "from nonet import native; print(native.library() is not None, native.reason())"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "NONET_NATIVE"} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)


@needs_compiler
@pytest.mark.parametrize("level", native.LEVELS)
def test_each_level_builds_and_has_every_function(level: str):
    if level not in native.supported():
        pytest.skip(f"this processor does not have {level}")
    library = native.load(level)
    for name in ("forward", "backward", "step", "prologue", "prologue_back", "epilogue", "epilogue_back"):
        for kind in ("f32", "f64"):
            assert hasattr(library, f"kda_{name}_{kind}")


@needs_compiler
def test_the_best_level_of_the_processor_is_taken(monkeypatch):
    monkeypatch.delenv("NONET_NATIVE", raising=False)
    assert native.level() == native.supported()[0]
    assert native.supported()[-1] == "portable"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if " avx512vl " in flags and " avx512bw " in flags:
        assert native.level() == "v4"
    elif " avx2 " in flags and " fma " in flags:
        assert native.level() == "v3"


@needs_compiler
def test_a_level_can_be_asked_for(asked):
    asked("portable")
    assert native.level() == "portable"
    assert native.library() is native.load("portable")


@needs_compiler
def test_a_level_the_processor_lacks_is_one_sentence(asked, monkeypatch):
    asked("v4")
    monkeypatch.setattr(native, "supported", lambda: ("v3", "portable"))
    for ask in (native.library, native.reason):
        with pytest.raises(UserError) as caught:
            ask()
        assert str(caught.value) == "NONET_NATIVE 'v4': this processor has only v3, portable; leave it unset"


def test_a_level_nobody_knows_is_one_sentence(asked):
    asked("v5")
    with pytest.raises(UserError, match="NONET_NATIVE 'v5': not one of 0, v4, v3, portable"):
        native.library()


def test_zero_switches_off(asked):
    asked("0")
    assert native.library() is None
    assert native.reason() == "NONET_NATIVE=0"


def test_without_a_compiler_there_is_a_reason_and_no_library(tmp_path):
    done = python("-c", ASK, PATH=str(tmp_path), CC="", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "False no C compiler (cc or gcc) on the PATH\n", done.stderr


@needs_compiler
def test_a_compiler_that_refuses_is_quoted(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no thanks' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = python("-c", ASK, CC=str(broken), XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "False the C compiler refused: x.c:1: error: no thanks\n", done.stderr


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    done = python("-c", ASK, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.stdout.startswith("False the native library cannot be built or loaded: "), done.stderr


@needs_compiler
def test_what_was_built_is_kept_and_nothing_else_is_left(tmp_path):
    first = python("-m", "nonet.native", XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"native: level {native.supported()[0]}, compiler ")
    kept = sorted(tmp_path.rglob("*"))
    assert [f.suffix for f in kept if f.is_file()] == [".so"] * len([f for f in kept if f.is_file()])
    times = {f: f.stat().st_mtime_ns for f in kept}
    again = python("-c", ASK, XDG_CACHE_HOME=str(tmp_path), PATH="", CC="")
    assert again.stdout == "True \n", again.stderr
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == times


def test_building_without_a_compiler_says_so_and_is_no_failure(tmp_path):
    done = python("-m", "nonet.native", PATH=str(tmp_path), CC="", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout == "native: none (no C compiler (cc or gcc) on the PATH); torch does the work, slower\n"


@needs_compiler
def test_a_changed_source_is_built_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "sources"
    folder.mkdir()
    shutil.copy(native.PROBE, folder / "probe.c")
    monkeypatch.setattr(native, "FOLDER", folder)
    first = native._compiled("x", [folder / "probe.c"], ())
    assert native._compiled("x", [folder / "probe.c"], ()) == first
    (folder / "extra.h").write_text("/* a header that something may include */\n")
    assert native._compiled("x", [folder / "probe.c"], ()) != first
