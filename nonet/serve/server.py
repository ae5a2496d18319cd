"""Run the application on a socket: what it prints, which signals end it, and with which status."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from nonet.chat import Tokenizer
from nonet.protocols import Generator
from nonet.serve.app import make_app
from nonet.serve.limits import Limits
from nonet.types import UserError

_CLOSE_S = 5  # after the last answer: for clients that do not read theirs


@dataclass(frozen=True, slots=True)
class Address:
    """Port 0: any free one. Other machines are let in only with a key."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""

    def __post_init__(self) -> None:
        if not (self.api_key or _is_loopback(self.host)):
            raise UserError(
                f"host = {self.host!r}: whoever reaches it could use the model; give an --api-key, "
                "or keep 127.0.0.1 and let a proxy or an SSH tunnel in front of it decide who may"
            )
        if not self.api_key.isascii() or any(c.isspace() for c in self.api_key):
            raise UserError("api_key: must be ASCII without blanks, for it travels in a header")


def serve(generator: Generator, tokenizer: Tokenizer, name: str, address: Address, limits: Limits) -> int:
    """Serve until SIGTERM or SIGINT. Exit status: 0 after a drain, 1 where the generator broke."""
    listener = listen(address)
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        logging.getLogger("uvicorn.error").error("the engine has failed", exc_info=error)
        failures.append(error)
        server.should_exit = True

    app = make_app(generator, tokenizer, name, limits, address.api_key, fail)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_CLOSE_S, server_header=False)
    server = _Server(config, app)
    print(_banner(listener, tokenizer, name, generator.context, address, limits), flush=True)
    asyncio.run(server.serve(sockets=[listener]))
    return 1 if failures else 0


class _Server(uvicorn.Server):
    """The first signal drains; a second one ends at once."""

    def __init__(self, config: uvicorn.Config, app: FastAPI):
        super().__init__(config)
        self._app = app
        self._drain: asyncio.Future[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._drain is not None or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._drain = drain = asyncio.ensure_future(self._app.state.service.drain())
        drain.add_done_callback(lambda _: setattr(self, "should_exit", True))


def listen(address: Address) -> socket.socket:
    """A socket that clients may connect to. UserError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=512)
    except (OSError, OverflowError) as e:
        raise UserError(f"{address.host} port {address.port}: {e}; choose another with --host or --port") from e
    # Connections inherit it. asyncio sets it only where the protocol is named, and without it the body of an answer
    # waits for the client to acknowledge its headers: 40 ms a request on a connection that is kept.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _banner(
    listener: socket.socket, tokenizer: Tokenizer, name: str, context: int, address: Address, limits: Limits
) -> str:
    """Model, address, limits, and a command that works."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if address.api_key else ""
    chat = tokenizer.template is not None
    ask = {"messages": [{"role": "user", "content": "Hello!"}]} if chat else {"prompt": "Once upon a time"}
    path = "chat/completions" if chat else "completions"
    return (
        f"nonet serve: {name} at {url}/v1{' (API key needed)' if key else ''}\n"
        f"  context {context} tokens; {limits.queued} answers may wait; a request: at most {limits.body_bytes} bytes, "
        f"{limits.request_s:g} s, {limits.choices} answers\n"
        f"  try: curl {url}/v1/{path}{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps({**ask, 'max_tokens': 32})}'\n"
        f"  state: {url}/health, {url}/metrics; SIGTERM finishes what runs, for up to {limits.drain_s:g} s"
    )
