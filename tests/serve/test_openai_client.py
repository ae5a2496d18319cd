"""The official client against a real server process: what is streamed is what is told whole."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


def test_the_model_is_listed_and_found_by_name(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "nonet"
    with pytest.raises(openai.NotFoundError, match="ask for 'tiny'"):
        client.models.retrieve("gpt-9")


def test_an_answer_tells_where_it_comes_from(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=5, seed=1)
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint == "nonet-v0" and answer.created > 1e9
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert 0 < answer.usage.completion_tokens <= 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("seed", range(6))
def test_a_streamed_chat_is_the_whole_chat(client, seed):
    asked = dict(
        model="tiny", messages=CHAT, max_tokens=40, seed=seed, n=2, logprobs=True, top_logprobs=3,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(p.delta.content or "" for p in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        assert [e for p in parts if p.logprobs for e in p.logprobs.content] == choice.logprobs.content
        assert [i for p in parts for i in getattr(p, "token_ids", [])] == choice.token_ids
        assert parts[-1].prompt_token_ids == whole.prompt_token_ids


@pytest.mark.parametrize("seed", range(4))
def test_a_streamed_completion_is_the_whole_completion(client, seed):
    asked = dict(model="tiny", prompt=["hello", "bye"], max_tokens=30, seed=seed, logprobs=2, stop=["a", '{"'])
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert not any(s in choice.text for s in asked["stop"])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for p in parts for value in getattr(p.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


def test_log_probs_belong_to_the_tokens(client, toolful):
    asked = dict(model="tiny", prompt="hello", max_tokens=20, temperature=0, logprobs=4)
    answer = client.completions.create(**asked, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert len(choice.token_ids) == len(choice.logprobs.tokens) == answer.usage.completion_tokens
    assert choice.logprobs.tokens == [toolful.decode([i]) for i in choice.token_ids]
    assert choice.text == toolful.decode([i for i in choice.token_ids if i not in toolful.stop_ids])
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    assert all(p <= 0 for p in choice.logprobs.token_logprobs)


def test_token_ids_go_in_and_come_out(client, toolful):
    ids = toolful.encode("hello there")
    body = {"return_token_ids": True}
    first = client.completions.create(model="tiny", prompt=ids, max_tokens=8, seed=3, extra_body=body).choices[0]
    assert first.prompt_token_ids == ids and len(first.token_ids) == len(first.token_logprobs) > 0
    text = client.completions.create(model="tiny", prompt="hello there", max_tokens=8, seed=3, extra_body=body)
    assert text.choices[0].token_ids == first.token_ids
    both = client.completions.create(model="tiny", prompt=[ids, ids[:1]], max_tokens=8, seed=3, extra_body=body)
    assert [c.prompt_token_ids for c in both.choices] == [ids, ids[:1]]
    assert both.choices[0].token_ids == first.token_ids


def test_echo_begins_with_the_prompt(client):
    asked = dict(model="tiny", prompt="hello", max_tokens=4, seed=5)
    plain, echoed = (client.completions.create(**asked, echo=e).choices[0].text for e in (False, True))
    assert echoed == "hello" + plain


def test_a_seed_decides_and_its_absence_does_not(client):
    def text(seed: int | None = None) -> str:
        return client.completions.create(model="tiny", prompt="hello", max_tokens=30, seed=seed).choices[0].text

    assert text(1) == text(1) != text(2)
    assert len({text() for _ in range(4)}) > 1


def test_the_answers_of_one_request_differ_and_are_the_same_again(client):
    asked = dict(model="tiny", messages=CHAT, max_tokens=20, seed=1, n=3)
    first, again = (client.chat.completions.create(**asked).choices for _ in range(2))
    assert [c.message.content for c in first] == [c.message.content for c in again]
    assert len({c.message.content for c in first}) == 3


def test_what_does_not_fit_the_context_is_refused_with_its_code(client):
    with pytest.raises(openai.BadRequestError, match="exceeds the context of 256") as refused:
        client.completions.create(model="tiny", prompt="x" * 250, max_tokens=100)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"


def test_the_asynchronous_client_is_served_many_at_a_time(served):
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0) as client:
            asked = dict(model="tiny", messages=CHAT, max_tokens=20)
            answers = [client.chat.completions.create(**asked, seed=i % 4) for i in range(24)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]

    texts = asyncio.run(all_at_once())
    assert len(set(texts)) == 4 and all(texts[i] == texts[i % 4] for i in range(24))


def test_nothing_is_in_flight_afterwards(served):
    text = httpx2.get(f"{served}/metrics").text
    assert "nonet_open_requests 0.0" in text and "nonet_queue_depth 0.0" in text
    assert 'nonet_requests_total{outcome="answered",route="/v1/chat/completions"}' in text


def test_the_engine_and_the_text_agree_on_where_a_stop_text_ends_the_answer(client, toolful):
    asked = dict(model="tiny", prompt="hello", max_tokens=60, seed=3, extra_body={"return_token_ids": True})
    free = client.completions.create(**asked).choices[0]
    stop = free.text[10:12]
    stopped = client.completions.create(**asked, stop=stop)
    choice = stopped.choices[0]
    assert choice.finish_reason == "stop" and choice.text == free.text.partition(stop)[0]
    n = stopped.usage.completion_tokens
    assert choice.token_ids == free.token_ids[:n]
    assert stop in toolful.decode(free.token_ids[:n]) and stop not in toolful.decode(free.token_ids[: n - 1])


def test_the_likeliest_tokens_are_told_beside_the_drawn_one(client):
    asked = dict(model="tiny", messages=CHAT, max_tokens=10, temperature=0, logprobs=True, top_logprobs=4)
    entries = client.chat.completions.create(**asked).choices[0].logprobs.content
    for entry in entries:
        told = [top.logprob for top in entry.top_logprobs]
        assert len(told) == 4 and told == sorted(told, reverse=True)
        assert entry.logprob == told[0] and entry.token == entry.top_logprobs[0].token
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_a_banned_token_is_not_drawn(client):
    asked = dict(model="tiny", prompt="hello", max_tokens=8, temperature=0, extra_body={"return_token_ids": True})
    likeliest = client.completions.create(**asked).choices[0].token_ids[0]
    banned = client.completions.create(**asked, logit_bias={str(likeliest): -100}).choices[0]
    assert likeliest not in banned.token_ids


def test_a_conversation_that_goes_on_is_remembered(client):
    text = "hello " * 12
    asked = [{"role": "system", "content": text}, {"role": "user", "content": "one"}]
    first = client.chat.completions.create(model="tiny", messages=asked, max_tokens=4).usage
    longer = [*asked, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    second = client.chat.completions.create(model="tiny", messages=longer, max_tokens=4).usage
    assert first.prompt_tokens_details.cached_tokens < second.prompt_tokens_details.cached_tokens <= first.prompt_tokens
