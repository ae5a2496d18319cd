"""How a server process ends: SIGTERM finishes or cuts what runs and exits with 0; a broken engine exits with 1."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx2
import pytest
import running

SCRIPT = Path(__file__).parent / "slow_server.py"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


def events(lines: Iterator[str]) -> Iterator[dict]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def streamed_until_the_end(url: str, max_tokens: int, on_first) -> list[dict]:
    """Every event of a streamed chat; on_first() is called when the first words have come."""
    with httpx2.Client(base_url=url, timeout=30) as client:
        body = {**CHAT, "max_tokens": max_tokens}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            out = []
            for event in events(response.iter_lines()):
                out.append(event)
                if len(out) == 3:
                    on_first()
            return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_takes_nothing_new(nano, number):
    with running.process([SCRIPT, nano.directory, "0.02", "20", "1000000"]) as (server, url):
        health, late = [], []

        def drain() -> None:
            server.send_signal(number)
            time.sleep(0.2)
            health.append(httpx2.get(f"{url}/health"))
            late.append(httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}))

        during: list[Thread] = []
        told = streamed_until_the_end(url, 60, lambda: (during.append(Thread(target=drain)), during[0].start()))
        during[0].join()
        assert told[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait(timeout=10) == 0
    assert health[0].status_code == 503
    assert health[0].json() == {"live": True, "ready": False, "draining": True}
    assert late[0].status_code == 503 and late[0].json()["error"]["code"] == "shutting_down"
    assert int(late[0].headers["Retry-After"]) > 0


def test_what_is_not_finished_at_the_deadline_is_cut_and_says_so(nano):
    with running.process([SCRIPT, nano.directory, "0.02", "0.3", "1000000"]) as (server, url):
        began = time.monotonic()
        told = streamed_until_the_end(url, 4000, lambda: server.send_signal(signal.SIGTERM))
        assert told[-1]["error"]["code"] == "shutting_down"
        assert server.wait(timeout=10) == 0
        assert time.monotonic() - began < 10


def test_a_second_signal_ends_at_once(nano):
    with running.process([SCRIPT, nano.directory, "0.02", "600", "1000000"]) as (server, url):

        def twice() -> None:
            server.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            server.send_signal(signal.SIGTERM)

        with pytest.raises(httpx2.HTTPError):
            streamed_until_the_end(url, 4000, twice)
        assert server.wait(timeout=10) == 0


def test_a_broken_engine_ends_the_process_with_an_error(nano):
    with running.process([SCRIPT, nano.directory, "0.001", "5", "20"]) as (server, url):
        told = streamed_until_the_end(url, 4000, lambda: None)
        assert told[-1]["error"]["code"] == "engine_failed"
        output, _ = server.communicate(timeout=10)
        assert server.returncode == 1
        assert "the machine is on fire" in output


def test_an_idle_server_ends_at_once(nano):
    with running.process([SCRIPT, nano.directory, "0", "30", "1000000"]) as (server, url):
        running.wait_until_ready(url)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=10) == 0
