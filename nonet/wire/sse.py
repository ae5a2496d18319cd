"""Server-sent events (WHATWG HTML, section 9.2): one `data:` line of JSON, then an empty line."""

from __future__ import annotations

import json
from typing import Any

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
