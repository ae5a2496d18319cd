"""An OpenAI-style server, asked from here: one address, JSON in and out, a busy server asked again.

What asks through it: teachers (`served`) and measurements of what is being served (`remote`).
"""

from __future__ import annotations

import os
import time
from typing import Any

import httpx2

from nonet.types import UserError

TRIES, BUSY = 6, (429, 502, 503, 504)  # a busy or restarting server is asked again after 1, 2, 4, ... seconds
LIMIT_S = 600.0


class Endpoint:
    """where: the address with its /v1, http://host:port/v1, and #MODEL where it serves more than one. OPENAI_API_KEY is
    sent along where it is set. Threads may share one. transport: what requests go through (None: the network).
    """

    def __init__(self, where: str, patience_s: float = 1.0, transport: httpx2.BaseTransport | None = None):
        self.where, self._patience_s = where, patience_s
        address, _, self._model = where.partition("#")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.Client(
            base_url=address.rstrip("/"), headers=headers, timeout=LIMIT_S, limits=limits, transport=transport
        )

    @property
    def model(self) -> str:
        """The name it serves under; asked for once. UserError where it serves several and none is named."""
        if not self._model:
            names = [m["id"] for m in self.ask("GET", "/models")["data"]]
            if len(names) != 1:
                raise UserError(f"{self.where}: serves {', '.join(names) or 'nothing'}; name one as {self.where}#MODEL")
            self._model = names[0]
        return self._model

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. UserError where there is none after all tries, or the server refuses."""
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                answer = self._client.request(method, path, json=body)
            except httpx2.TransportError as e:
                if last:
                    raise UserError(f"{self.where}: no answer ({type(e).__name__}: {e}); is the server up?") from e
            else:
                if answer.is_success:
                    return answer.json()
                if last or answer.status_code not in BUSY:
                    raise UserError(f"{self.where}: {answer.status_code}: {answer.text[:300]}")
            time.sleep(self._patience_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        self._client.close()
