"""A server under mixed load: 1,000 requests of 32 clients, some hung up, some malformed, some overlong.

unanswered counts requests that got anything but what they must get: an answer, a refusal that fits, or nothing after
they hung up. left counts what the server and its engine still hold once all have ended: open requests, queued answers,
live pages and slots. rss_growth_mb is resident memory after the run less memory after the warm-up.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from nonet.chat.training import train as train_tokenizer
from nonet.model import Model, ModelConfig, hf
from nonet.model.init import initialise
from nonet.progress import progress

CONTEXT = 256
_WORDS = ("the cat sat on the mat and looked at the moon", "one two three four five six seven", "hello there")
_JSON = {"Content-Type": "application/json"}
_MALFORMED = (b"{", b"[]", b'{"prompt": 7, "messages": 7}', b'{"nonsense": 1}')
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Load:
    """What is sent. Shares of hang-ups, malformed and overlong requests; the rest is ordinary."""

    requests: int = 1000
    clients: int = 32
    warm_up: int = 300
    hang_up: float = 0.10
    malformed: float = 0.05
    overlong: float = 0.05

    def kind(self, rng: random.Random) -> str:
        shares = (self.hang_up, self.malformed, self.overlong)
        names = ("hang_up", "malformed", "overlong", "ordinary")
        return rng.choices(names, [*shares, 1 - sum(shares)])[0]


def measure(work: Load = Load()) -> dict[str, Any]:
    with TemporaryDirectory() as name:
        make_model(Path(name))
        with server(Path(name)) as (process, port):
            run(port, work, "warm-up", work.warm_up)
            before = _settled_rss(process, port)
            began = time.perf_counter()
            got = run(port, work, "load", work.requests)
            seconds = time.perf_counter() - began
            after = _settled_rss(process, port)
            held = left(port)
    first = [s for _, _, s in got if s is not None]
    return {
        "unanswered": sum(not ok for _, ok, _ in got),
        "left": sum(held.values()),
        "rss_growth_mb": (after - before) / 1e6,
        "rss_mb": {"after warm-up": before / 1e6, "after": after / 1e6},
        "held": held,
        "requests": dict(Counter(kind for kind, _, _ in got)),
        "clients": work.clients,
        "seconds": seconds,
        "median_seconds_to_first_event": median(first) if first else None,
    }


def make_model(out: Path) -> None:
    """A small hybrid of random weights, with a tokenizer and a chat template."""
    train_tokenizer([*_WORDS] * 50, 300, out)
    vocab = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
    shape: dict[str, Any] = dict(d_model=64, d_ff=96, layers=4, heads=4, kda_head_dim=16, decay_rank=8, q_lora_rank=24)
    shape |= dict(kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, max_position=CONTEXT)
    hf.save(initialise(Model(ModelConfig(vocab_size=len(vocab) + 8, **shape)), 0), out)


@contextmanager
def server(model: Path) -> Iterator[tuple[psutil.Process, int]]:
    """`nonet serve` on a free port, as a process; ends with SIGTERM and must exit with 0."""
    command = [sys.executable, "-m", "nonet.cli", "serve", str(model), "--port", "0", "--name", "m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = (re.search(r"state: http://127\.0\.0\.1:(\d+)/health", line) for line in process.stdout)
        port = int(next(found for found in lines if found)[1])
        yield psutil.Process(process.pid), port
        process.terminate()
        if (status := process.wait(60)) != 0:
            raise AssertionError(f"the server ended with status {status} after SIGTERM")
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------------------- load


def run(port: int, work: Load, name: str, count: int) -> list[tuple[str, bool, float | None]]:
    """(kind, whether it got what it must get, seconds to its first byte) of each request, `work.clients` at a time."""
    done: list[tuple[str, bool, float | None]] = []
    with ThreadPoolExecutor(work.clients) as clients, progress(f"bench serve: {name}", count) as bar:
        for outcome in clients.map(lambda i: _request(port, work, random.Random(f"{name}/{i}")), range(count)):
            done.append(outcome)
            bar(len(done), "")
    return done


def _request(port: int, work: Load, rng: random.Random) -> tuple[str, bool, float | None]:
    kind = work.kind(rng)
    path, body = _body(kind, rng)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        began = time.perf_counter()
        connection.request("POST", path, body, _JSON)
        response = connection.getresponse()
        first = time.perf_counter() - began
        if kind == "hang_up":
            response.read(rng.randrange(1, 400))
            return kind, response.status == 200, None
        return kind, _fits(kind, response.status, response.read().decode()), first if kind == "ordinary" else None
    finally:
        connection.close()


def _body(kind: str, rng: random.Random) -> tuple[str, bytes]:
    if kind == "malformed":
        return rng.choice([_CHAT, _TEXT]), rng.choice(_MALFORMED)
    text = " ".join(rng.choice(_WORDS) for _ in range(200 if kind == "overlong" else rng.randrange(1, 4)))
    asked: dict[str, Any] = {"n": rng.choice([1, 1, 2]), "temperature": rng.choice([0, 0.7, 1])}
    asked |= {"max_tokens": 150 if kind == "hang_up" else rng.randrange(1, 48)}
    asked |= {"stream": kind == "hang_up" or rng.random() < 0.5}
    if rng.random() < 0.5:
        return _TEXT, json.dumps({**asked, "prompt": text, "logprobs": rng.choice([None, 2])}).encode()
    return _CHAT, json.dumps({**asked, "messages": [{"role": "user", "content": text}], "stop": "zz"}).encode()


def _fits(kind: str, status: int, text: str) -> bool:
    """Whether this is a complete answer, or the refusal this kind must get."""
    if kind == "ordinary":
        complete = text.endswith("data: [DONE]\n\n") or (text.startswith("{") and "usage" in json.loads(text))
        return status == 200 and complete
    code = json.loads(text)["error"]["code"]
    return status == 400 and (kind == "malformed" or code == "context_length_exceeded")


# ------------------------------------------------------------------------------ after


def left(port: int) -> dict[str, float]:
    """What the server and its engine hold: open requests, queued answers, requests in the engine, pages in use."""
    names = "nonet_open_requests|nonet_queue_depth|nonet_engine_(?:running|waiting|pages_live)"
    found = re.findall(rf"^({names}) (\S+)$", _get(port, "/metrics"), re.MULTILINE)
    return {name: float(value) for name, value in found}


def _settled_rss(process: psutil.Process, port: int) -> int:
    """Bytes, once nothing is in flight; hang-ups take a moment to be noticed."""
    until = time.monotonic() + 30
    while sum(left(port).values()) and time.monotonic() < until:
        time.sleep(0.05)
    return process.memory_info().rss


def _get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()
