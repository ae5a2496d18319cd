"""The wire between `python_runner` and `job_server`: a 4-byte big-endian length, then that many bytes of JSON.

Standard library only, for both ends import it. Invariant: a frame arrives whole or not at all (None).
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any


def write(fd: int, message: Any) -> None:
    body = json.dumps(message).encode()
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        view = view[os.write(fd, view) :]


def read(fd: int, deadline: float | None = None) -> Any:
    """The next message; None when the other side is gone or `deadline` (of time.monotonic) has passed."""
    header = _exactly(fd, 4, deadline)
    body = _exactly(fd, int.from_bytes(header, "big"), deadline) if header else b""
    return json.loads(body) if body else None


def _exactly(fd: int, count: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return b""
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
