"""C sources behind fast paths: compiled once per machine with the C compiler that is there, loaded by ctypes.

A machine without a compiler works the same through torch; `library` then returns None and `reason` says why. Switch it
off with NONET_NATIVE=0. Built files live in the user's cache directory, named by the source's hash and the compiler's
view of the processor, so a changed source or machine builds anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "decode.c"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None: switched off, or no compiler, or the compiler refused (see `reason`)."""
    if reason():
        return None
    return ctypes.CDLL(str(_built()))


@cache
def reason() -> str:
    """Why there is no native library, in one sentence; empty if there is one."""
    if os.environ.get("NONET_NATIVE") == "0":
        return "NONET_NATIVE=0"
    if _compiler() is None:
        return "no C compiler (cc or gcc) on the PATH"
    try:
        _built()
    except subprocess.CalledProcessError as e:
        return f"the C compiler refused {SOURCE.name}: {e.stderr.strip().splitlines()[0]}"
    return ""


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")


@cache
def _built() -> Path:
    """Path of the shared object, compiled if this source on this processor has none yet (a few seconds)."""
    compiler = _compiler()
    assert compiler is not None
    target = subprocess.run(
        [compiler, "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=False
    ).stdout
    name = hashlib.sha256(SOURCE.read_bytes() + target.encode() + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nonet"
    built = folder / f"decode-{name}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so") as partial:
            command = [compiler, *FLAGS, str(SOURCE), "-o", partial.name, "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.link(partial.name, built.with_suffix(f".{os.getpid()}"))
        built.with_suffix(f".{os.getpid()}").rename(built)
    return built
