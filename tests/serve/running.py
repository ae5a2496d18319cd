"""Servers for tests: an application on a socket of this event loop, and a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI

from nonet.serve.server import Address, listen

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[str]:
    """The address of `app`, served over TCP as `nonet serve` does."""
    listener = listen(Address(port=0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def client_of(app: FastAPI, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with running(app) as url, httpx2.AsyncClient(base_url=url, timeout=30, **options) as client:
        yield client


@contextmanager
def process(command: Sequence[str | Path]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and the address it printed; killed at the end if it still runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = subprocess.Popen([sys.executable, *map(str, command)], env=environment, **pipes)
    try:
        yield started, _address(started)
    finally:
        started.kill()
        started.communicate()


def _address(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    seen = ""
    for line in started.stdout:
        seen += line
        found = re.search(r"state: (http://\S+?)/health", line)
        if found:
            return found[1]
    raise AssertionError(seen)


def wait_until_ready(url: str) -> None:
    with httpx2.Client(base_url=url, timeout=30) as client:
        assert client.get("/health").json()["ready"]
