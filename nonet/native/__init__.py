"""C sources behind fast paths: compiled once per machine with the C compiler that is there, loaded by ctypes.

Every .c file of this folder goes into one library per *level* of the processor; the best level the processor has is
built at first use (seconds) and kept in the user's cache directory under the hash of sources and flags:

    v4        x86-64-v4: AVX-512            v3        x86-64-v3: AVX2 and FMA
    portable  what every processor of this architecture has

NONET_NATIVE=0 switches all of it off; NONET_NATIVE=portable, v3 or v4 asks for a level. A machine without a compiler
works the same through torch: `library` then returns None and `reason` says why. `python -m nonet.native` builds now.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nonet.types import UserError

FOLDER = Path(__file__).parent
PROBE = FOLDER / "level.c"  # runs before a level is known: built apart, for any processor
FLAGS = ("-O3", "-fopenmp", "-fPIC", "-Wno-psabi")
LEVELS = {"v4": ("-march=x86-64-v4",), "v3": ("-march=x86-64-v3",), "portable": ()}


@cache
def library() -> ctypes.CDLL | None:
    """The library of this processor's level, or None: switched off, no compiler, or it refused (see `reason`).

    NONET_NATIVE is read at the first call and then never again: a decode step asks thousands of times a second.
    """
    return _found()[0]


def reason() -> str:
    """Why there is no native library, in one sentence; empty if there is one."""
    return _found()[1]


@cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    """(library, why there is none)."""
    if os.environ.get("NONET_NATIVE") == "0":
        return None, "NONET_NATIVE=0"
    try:
        return load(level()), ""
    except FileNotFoundError as e:
        return None, str(e)
    except subprocess.CalledProcessError as e:
        return None, f"the C compiler refused: {_first_complaint(e.stderr)}"
    except OSError as e:
        return None, f"the native library cannot be built or loaded: {e}"


def forget() -> None:
    """Read NONET_NATIVE again at the next call."""
    library.cache_clear()
    _found.cache_clear()


def level() -> str:
    """The level in use: the best the processor has, or the one NONET_NATIVE asks for."""
    asked = os.environ.get("NONET_NATIVE", "")
    if asked and asked not in LEVELS:
        raise UserError(f"NONET_NATIVE {asked!r}: not one of 0, {', '.join(LEVELS)}")
    has = supported()
    if asked and asked not in has:
        raise UserError(f"NONET_NATIVE {asked!r}: this processor has only {', '.join(has)}; leave it unset")
    return asked or has[0]


@cache
def supported() -> tuple[str, ...]:
    """Levels this processor can run, best first."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ("portable",)
    number = ctypes.CDLL(str(_compiled("probe", [PROBE], ()))).processor_level()
    return tuple(name for name, least in (("v4", 4), ("v3", 3), ("portable", 0)) if number >= least)


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of one level; built if these sources have none yet."""
    return ctypes.CDLL(str(build(name)))


def build(name: str) -> Path:
    """Path of one level's library, compiled if it is not there yet.

    Raises FileNotFoundError (no compiler), CalledProcessError (the compiler's words) or OSError (the cache directory).
    """
    return _compiled(f"native-{name}", sorted(set(FOLDER.glob("*.c")) - {PROBE}), LEVELS[name])


def compiler() -> str | None:
    """$CC, cc or gcc, whichever is found first."""
    return shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")


def _compiled(stem: str, sources: list[Path], extra: tuple[str, ...]) -> Path:
    """folder/stem-hash.so from these sources and all headers. Compilers run side by side, one per source; the finished
    file appears at once under its name, so that processes which build at the same time do not see halves.
    """
    texts = [f.name.encode() + f.read_bytes() for f in (*sources, *sorted(FOLDER.glob("*.h")))]
    told = " ".join((*FLAGS, *extra, platform.machine())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nonet"
    built = folder / f"{stem}-{hashlib.sha256(told + b''.join(texts)).hexdigest()[:16]}.so"
    if built.exists():
        return built
    cc = compiler()
    if cc is None:
        raise FileNotFoundError("no C compiler (cc or gcc) on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        objects = [Path(name) / f"{source.stem}.o" for source in sources]
        commands = [[cc, *FLAGS, *extra, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
        _run_all(commands)
        linked = Path(name) / "linked.so"
        _run_all([[cc, *FLAGS, *extra, "-shared", *map(str, objects), "-o", str(linked), "-lm"]])
        linked.replace(built)
    return built


def _run_all(commands: list[list[str]]) -> None:
    """Run commands side by side; the first that fails raises with its words."""
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    words = [process.communicate()[1] for process in running]
    for process, command, said in zip(running, commands, words, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def _first_complaint(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it gave no reason"])[0]
