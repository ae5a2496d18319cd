"""The door: API key, size of the body and time to send it, before anything else looks at a request."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from nonet.serve.limits import Limits
from nonet.wire.ask import Refusal
from nonet.wire.openai import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN_TO_ALL = ("/health",)


class Guard:
    """ASGI middleware. The body is read here, up to the limit, and handed on in one piece; a larger one is read to its
    end without being kept, so that its sender hears why it is refused. scope["began"]: time.monotonic() at arrival.
    """

    def __init__(self, app: App, limits: Limits, api_key: str = ""):
        self._app, self._limits, self._key = app, limits, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["began"] = time.monotonic()
        try:
            self._check_key(scope)
            body = await self._body(receive)
        except Refusal as refusal:
            scope["app"].state.service.metrics.refused("any", refusal.status)
            await refusal_response(refusal)(scope, receive, send)
            return
        if body is None:
            return
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def handed_on() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, handed_on, send)

    def _check_key(self, scope: Scope) -> None:
        if not self._key or scope["path"] in _OPEN_TO_ALL:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, b"Bearer " + self._key):
            told = "the API key is missing or wrong; send it as the header 'Authorization: Bearer KEY'"
            raise Refusal(told, 401, "authentication_error", "invalid_api_key")

    async def _body(self, receive: Receive) -> bytes | None:
        """None where the client went away."""
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._limits.request_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    size += len(piece)
                    if size <= self._limits.body_bytes:
                        pieces.append(piece)
        except TimeoutError:
            told = f"the body took longer than {self._limits.request_s:g} s to arrive; send it faster"
            raise Refusal(told, 408, code="timeout") from None
        if size > self._limits.body_bytes:
            told = f"body = {size} bytes: at most {self._limits.body_bytes} are allowed; send a shorter conversation"
            raise Refusal(told, 413, code="request_too_large")
        return b"".join(pieces)


def refusal_response(refusal: Refusal) -> JSONResponse:
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), refusal.status, headers)
