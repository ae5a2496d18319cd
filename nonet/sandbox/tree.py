"""A directory of small files as a value: read it whole, write it whole, keep it plain.

Invariant: a path handed out or accepted is relative, uses "/", and names a regular file below the root that no
symbolic link leads to; directories exist only because a file lies in them.
Refuses: absolute paths, "..", control characters, and trees beyond MAX_FILES files or MAX_BYTES bytes.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping

MAX_FILES = 256
MAX_BYTES = 1 << 20
MAX_PATH = 200

Snapshot = dict[str, dict[str, str]]


class TreeError(Exception):
    """One sentence about a path or a tree that cannot be."""


def clean(path: str) -> str:
    """The canonical form of a relative path, or a TreeError.

    >>> clean("./notes//a.txt")
    'notes/a.txt'
    """
    if path.startswith("/"):
        raise TreeError(f"{_short(path)}: use a relative path")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise TreeError("the path is empty")
    if ".." in parts:
        raise TreeError(f"{_short(path)}: '..' is not allowed")
    if not path.isprintable() or "\\" in path:
        raise TreeError(f"{_short(path)}: the path has characters that are not allowed")
    out = "/".join(parts)
    if len(out.encode()) > MAX_PATH:
        raise TreeError(f"the path is longer than {MAX_PATH} bytes")
    return out


def _short(path: str) -> str:
    return ascii(path[:40])


def locate(root: str, path: str) -> str:
    """The absolute name of a cleaned path; refuses one that passes through a link or through a file."""
    name = root
    for part in path.split("/"):
        if name != root and os.path.isfile(name):  # noqa: PTH113
            raise TreeError(f"{path}: {name[len(root) + 1 :]} is a file, not a directory")
        name = f"{name}/{part}"
        if os.path.islink(name):  # noqa: PTH114
            raise TreeError(f"{path}: links are not allowed")
    return name


def walk(root: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(relative path, entry) of every regular file, in no particular order; links are passed over."""
    stack = [""]
    while stack:
        prefix = stack.pop()
        with os.scandir(f"{root}/{prefix}") as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    stack.append(f"{prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield prefix + entry.name, entry


def read(root: str) -> dict[str, bytes]:
    """Every file, in the order of their paths."""
    return {path: read_file(entry.path) for path, entry in sorted(walk(root), key=lambda item: item[0])}


def read_file(name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)


def write_file(root: str, path: str, content: bytes, flags: int = os.O_TRUNC) -> None:
    """Write one file (`flags` = os.O_APPEND extends it), creating the directories above it."""
    name = locate(root, path)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(name), 0o700, exist_ok=True)  # noqa: PTH103, PTH120
        fd = os.open(name, flags, 0o600)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


def prune(root: str, path: str) -> None:
    """Remove the directories above `path` that have become empty."""
    parent = path.rpartition("/")[0]
    while parent:
        try:
            os.rmdir(f"{root}/{parent}")  # noqa: PTH106
        except OSError:
            return
        parent = parent.rpartition("/")[0]


def remove(directory: str) -> None:
    """Delete a directory and all below it; modes that a program has taken away are put back first."""
    os.chmod(directory, 0o700)  # noqa: PTH101
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)  # noqa: PTH108
    os.rmdir(directory)  # noqa: PTH106


def sweep(root: str, directory: str = "") -> None:
    """After a program ran: keep regular files with valid names, give modes back, drop empty directories."""
    here = f"{root}/{directory}" if directory else root
    os.chmod(here, 0o700)  # noqa: PTH101
    with os.scandir(here) as entries:
        for entry in list(entries):
            path = f"{directory}/{entry.name}" if directory else entry.name
            if entry.is_dir(follow_symlinks=False):
                sweep(root, path)
            elif entry.is_file(follow_symlinks=False) and _valid(path):
                os.chmod(entry.path, 0o600)  # noqa: PTH101
            else:
                os.unlink(entry.path)  # noqa: PTH108
    if directory and not os.listdir(here):  # noqa: PTH208
        os.rmdir(here)  # noqa: PTH106


def _valid(path: str) -> bool:
    try:
        return clean(path) == path
    except (TreeError, UnicodeEncodeError):
        return False


def fits(files: Mapping[str, bytes]) -> bool:
    return len(files) <= MAX_FILES and sum(map(len, files.values())) <= MAX_BYTES


def encode(files: Mapping[str, bytes]) -> Snapshot:
    """JSON-able: UTF-8 files as text, others as base64."""
    out: Snapshot = {"text": {}, "base64": {}}
    for path, content in files.items():
        try:
            out["text"][path] = content.decode()
        except UnicodeDecodeError:
            out["base64"][path] = base64.b64encode(content).decode("ascii")
    return out


def decode(snapshot: Mapping[str, Mapping[str, str]]) -> dict[str, bytes]:
    text = {path: content.encode() for path, content in snapshot["text"].items()}
    return text | {path: base64.b64decode(content) for path, content in snapshot["base64"].items()}
