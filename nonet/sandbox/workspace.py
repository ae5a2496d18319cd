"""Where sandboxes live on disk, and the clearing up after a process that was killed.

Invariant: a directory's name says which process made it; one whose process is gone is deleted by the next process of
the same user that makes a directory. Refuses: touching what another PID namespace (a container) has made.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from nonet.sandbox import tree

MEMORY = "/dev/shm"
MEMORY_ROOM = 32 << 20  # bytes that must be free in /dev/shm for it to be used
_swept: set[tuple[int, str]] = set()


def base_directory() -> str:
    """Memory (/dev/shm, ten times faster than a disk for this) if there is room, unless TMPDIR says otherwise."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK | os.X_OK):
        return tempfile.gettempdir()
    room = os.statvfs(MEMORY)
    return MEMORY if room.f_bavail * room.f_frsize >= MEMORY_ROOM else tempfile.gettempdir()


def new_directory() -> str:
    """A new empty directory of this process; the first call also deletes what dead processes left."""
    base, pid = base_directory(), os.getpid()
    if (pid, base) not in _swept:
        _swept.add((pid, base))
        sweep(base)
    return tempfile.mkdtemp(prefix=f"nonet-{_namespace()}-{pid}-", dir=base)


def sweep(base: str) -> None:
    """Delete the directories of processes that no longer exist."""
    name = re.compile(rf"nonet-{_namespace()}-(\d+)-\w+")
    for entry in Path(base).glob("nonet-*"):
        match = name.fullmatch(entry.name)
        if match and not _exists(int(match[1])) and not entry.is_symlink():
            try:
                tree.remove(str(entry))
            except OSError:  # another user's, or another process is sweeping too
                continue


def _namespace() -> int:
    """Process ids mean something only within their namespace, and /dev/shm may be shared between several."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
