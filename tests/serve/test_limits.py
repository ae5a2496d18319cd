"""What the server refuses, how it says so, and that it frees what nobody waits for any more."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest
from running import client_of, running
from typist import Typist

from nonet.chat import Tokenizer
from nonet.serve import Address, Limits, make_app
from nonet.types import UserError

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def typist(t: Tokenizer, **options: Any) -> Typist:
    words = t.encode("hello ")
    return Typist(lambda _: words, t.decode, **options)


def posted(app: Any, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx2.Response:
    async def post() -> httpx2.Response:
        async with client_of(app) as client:
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await client.post(path, **how, **options)

    return asyncio.run(post())


def error(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"} and "\n" not in body["message"]
    return body


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format.type", "text"),
        ({"best_of": 3}, "best_of", "no such field"),
        ({"guided_regex": "a+"}, "guided_regex", "no such field; leave it out"),
        ({"temperature": -1}, "temperature", "temperature = -1"),
        ({"temperature": 1e-40}, "temperature", "0 (greedy) or at least"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"n": 17}, "n", "at most 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"top_logprobs": 3}, "top_logprobs", "only with logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "text"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content: missing"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "half a surrogate pair"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(nano, fields, param, says):
    body = json.dumps({**CHAT, **fields}).encode()
    told = error(posted(make_app(typist(nano), nano, "m"), body, headers={"Content-Type": "application/json"}), 400)
    assert says in told["message"]
    assert param is None or told["param"] == param


def test_fields_that_change_nothing_are_accepted(nano):
    harmless = {
        "user": "u", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "frequency_penalty": None,
        "functions": None, "response_format": {"type": "text"}, "logprobs": None, "parallel_tool_calls": True,
    }  # fmt: skip
    assert posted(make_app(typist(nano), nano, "m"), {**CHAT, "max_tokens": 1, **harmless}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "a", "seed": 1e999}', b"[" * 100_000])
def test_what_is_no_request_is_a_sentence(nano, body):
    response = posted(
        make_app(typist(nano), nano, "m"), body, "/v1/completions", headers={"Content-Type": "application/json"}
    )
    error(response, 400)


def test_paths_and_methods_that_do_not_exist(nano):
    app = make_app(typist(nano), nano, "m")
    error(posted(app, {}, "/v1/embeddings"), 404)
    error(posted(app, {}, "/v1/models"), 405)
    assert error(posted(app, {**CHAT, "model": "gpt-9"}), 404)["code"] == "model_not_found"


def test_what_the_generator_refuses_is_told(nano):
    told = error(posted(make_app(typist(nano), nano, "m"), {"prompt": [1, 10**6]}, "/v1/completions"), 400)
    assert "outside the vocabulary" in told["message"]


def test_a_body_may_not_be_too_large_even_if_it_does_not_say_how_large(nano):
    app = make_app(typist(nano), nano, "m", Limits(body_bytes=1000))
    told = error(posted(app, {"prompt": "x" * 5000}, "/v1/completions"), 413)
    assert "at most 1000" in told["message"]

    async def chunks():
        for _ in range(50):
            yield b"x" * 100

    async def post() -> httpx2.Response:
        async with client_of(app) as client:
            return await client.post("/v1/completions", content=chunks())

    error(asyncio.run(post()), 413)


def test_an_api_key_is_asked_for_everywhere_but_in_health(nano):
    app = make_app(typist(nano), nano, "m", api_key="secret")

    async def statuses(headers: dict[str, str]) -> list[int]:
        async with client_of(app, headers=headers) as client:
            got = [(await client.get(p)).status_code for p in ("/health", "/v1/models", "/metrics", "/openapi.json")]
            return [*got, (await client.post("/v1/completions", json={"prompt": "a"})).status_code]

    assert asyncio.run(statuses({})) == [200, 401, 401, 401, 401]
    assert asyncio.run(statuses({"Authorization": "Bearer secre"})) == [200, 401, 401, 401, 401]
    assert asyncio.run(statuses({"Authorization": "Bearer secret"})) == [200] * 5


def test_other_machines_are_let_in_only_with_a_key():
    for host in ("0.0.0.0", "192.168.0.7", "::", "example.org"):
        with pytest.raises(UserError, match="give an --api-key"):
            Address(host)
        assert Address(host, api_key="k").host == host
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        assert Address(host).host == host
    with pytest.raises(UserError, match="ASCII without blanks"):
        Address(api_key="a b")


# ------------------------------------------------------------------ queue, time, hang-ups


def test_a_full_queue_says_when_to_come_again(nano):
    slow = typist(nano, step_s=0.2)
    app = make_app(slow, nano, "m", Limits(queued=3))

    async def burst() -> list[httpx2.Response]:
        async with client_of(app) as client:
            body = {"prompt": "a", "max_tokens": 2}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))

    responses = asyncio.run(burst())
    refused = [r for r in responses if r.status_code == 429]
    assert 0 < len(refused) < 8 and all(r.status_code in (200, 429) for r in responses)
    assert all(error(r, 429)["code"] == "queue_full" and int(r.headers["Retry-After"]) > 0 for r in refused)


def test_an_answer_that_takes_too_long_is_ended_and_freed(nano):
    slow = typist(nano, step_s=0.02)
    app = make_app(slow, nano, "m", Limits(request_s=0.3))

    async def both() -> tuple[httpx2.Response, str]:
        async with client_of(app) as client:
            whole = await client.post("/v1/chat/completions", json=CHAT)
            stream = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            await asyncio.sleep(0.1)
            assert app.state.service.open == 0
            return whole, stream.text

    whole, events = asyncio.run(both())
    assert error(whole, 504)["code"] == "timeout"
    last = json.loads(events.strip().split("data: ")[-1])
    assert last["error"]["code"] == "timeout" and "hello" in events
    assert not slow.busy


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_frees_the_request_within_one_step(nano, stream):
    """The server learns of it from the closed socket; one step may be running then, no second one may start."""
    slow = typist(nano, step_s=0.15)
    app = make_app(slow, nano, "m")
    body = json.dumps({**CHAT, "stream": stream}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])

    async def hang_up() -> int:
        async with running(app) as url:
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            while slow.steps < 3:
                await asyncio.sleep(0.01)
            before = slow.steps
            writer.transport.abort()
            until = time.monotonic() + 5
            while slow.busy and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert app.state.service.open == 0
            metrics = (await app.state.service.metrics_text()).decode()
            assert 'outcome="hung_up"' in metrics
            return slow.aborted_at[slow.requests[0].id] - before

    assert asyncio.run(hang_up()) <= 1
    assert not slow.busy


def test_a_generator_that_breaks_ends_every_answer_with_an_error(nano):
    failures: list[BaseException] = []
    app = make_app(typist(nano, step_s=0.01, breaks_at=5), nano, "m", on_failure=failures.append)

    async def during_and_after() -> list[httpx2.Response]:
        async with client_of(app) as client:
            during = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(3)))
            after = await client.post("/v1/chat/completions", json=CHAT)
            health = await client.get("/health")
            return [*during, after, health]

    *during, after, health = asyncio.run(during_and_after())
    assert all(error(r, 500)["code"] == "engine_failed" for r in during)
    error(after, 503)
    assert health.status_code == 503 and health.json()["live"] is False
    assert [str(f) for f in failures] == ["the machine is on fire"]


# -------------------------------------------------------------------- what is passed on


def test_everything_asked_for_reaches_the_generator(nano):
    seen = typist(nano)
    body = {
        "prompt": ["hello", [1, 2]], "n": 2, "max_tokens": 3, "seed": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logprobs": 2,
        "logit_bias": {"5": -100}, "stop": ["zz"],
    }  # fmt: skip
    response = posted(make_app(seen, nano, "m"), body, "/v1/completions")
    assert response.status_code == 200, response.text
    assert [(r.tokens, r.stream) for r in seen.requests] == [
        (tuple(nano.encode("hello")), "0"), (tuple(nano.encode("hello")), "1"), ((1, 2), "0"), ((1, 2), "1"),
    ]  # fmt: skip
    first = seen.requests[0]
    s = first.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.9, 7, 0.1, 9)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.5)
    assert s.logit_bias == ((5, -100.0),) and first.stop_texts == ("zz",) and first.top_logprobs == 2
    assert first.stop_ids == nano.stop_ids and first.max_tokens == 3
    told = response.json()
    assert told["usage"] == {
        "prompt_tokens": len(nano.encode("hello")) + 2, "completion_tokens": 12,
        "total_tokens": len(nano.encode("hello")) + 14, "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8},
    }  # fmt: skip
    logprobs = told["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.25, -0.5, -0.75]
    assert logprobs["top_logprobs"][0] == {nano.decode([0]): -1.0, nano.decode([1]): -2.0}
    assert told["system_fingerprint"] == "nonet-v7"


def test_a_chat_without_a_limit_gets_the_rest_of_the_context(nano):
    seen = typist(nano, context=64)
    response = posted(make_app(seen, nano, "m"), CHAT)
    request = seen.requests[0]
    assert len(request.tokens) + request.max_tokens == 64
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert request.boundaries == (len(request.tokens) - 1,)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_is_cut_off_but_its_tokens_are_counted(nano, stream):
    t = typist(nano)
    spelled = len(nano.encode("hello hel"))
    response = posted(make_app(t, nano, "m"), {**CHAT, "stop": "hello hel"[2:], "stream": stream,
                      **({"stream_options": {"include_usage": True}} if stream else {})})  # fmt: skip
    if stream:
        events = [json.loads(e) for e in response.text.split("data: ")[1:-1]]
        text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
        usage, finish = events[-1]["usage"], events[-2]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, usage, finish = choice["message"]["content"], response.json()["usage"], choice["finish_reason"]
    assert (text, finish) == ("he", "stop")
    assert abs(usage["completion_tokens"] - spelled) <= 2 and usage["completion_tokens"] > len(nano.encode("he"))


def test_figures_of_the_generator_are_metrics(nano):
    app = make_app(typist(nano), nano, "m")

    async def metrics() -> str:
        async with client_of(app) as client:
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
            await client.post("/v1/completions", json={"nonsense": 1})
            return (await client.get("/metrics")).text

    text = asyncio.run(metrics())
    assert "# TYPE nonet_engine_steps_total counter\nnonet_engine_steps_total 4.0" in text
    assert "# TYPE nonet_engine_pages_live gauge\nnonet_engine_pages_live 0.0" in text
    assert 'nonet_requests_total{outcome="answered",route="/v1/completions"} 1.0' in text
    assert 'nonet_requests_total{outcome="refused_400",route="/v1/completions"} 1.0' in text
    assert "nonet_time_to_first_token_seconds_count 1.0" in text
    assert "nonet_time_per_token_seconds_count 1.0" in text
