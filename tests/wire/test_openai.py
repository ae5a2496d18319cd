"""Bodies become Asks, what was written becomes bodies and events; both ways nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from nonet.types import Message, Reasoning, Text, Tool, ToolCall, ToolResult
from nonet.wire.ask import Head, Refusal, Token, Usage, Written
from nonet.wire.openai import error_body, invalid
from nonet.wire.openai_chat import ChatBody, ChatReply
from nonet.wire.openai_completions import CompletionBody, CompletionReply
from nonet.wire.sse import DONE, event

HEAD = Head("id-1", "m", 7, "nonet-v3", ((1, 2),))
USAGE = Usage(5, 3, 4)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "description": "d"}}
TOKENS = (Token(9, "a", 0, -1.0, -0.5, (("a", -1.0), ("b", -2.0))), Token(8, "\ufffd", 1, -3.0, -2.5))


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def told(events: Any) -> list[dict[str, Any]]:
    return [json.loads(e.removeprefix(b"data: ")) for e in events if e != DONE]


# --------------------------------------------------------------------------- bodies


def test_messages_keep_their_parts():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
        ]
    }
    assert ChatBody.model_validate(body).ask().messages == (
        Message.system("be brief"),
        Message("assistant", (Reasoning("hm"), Text("so"), ToolCall("add", {"a": [1, "é"]}, "c1"))),
        Message("tool", (ToolResult("3", call="c1"),)),
    )


def test_a_reply_can_be_sent_back_as_it_came():
    """The official client dumps a message with every field it knows, absent ones as null."""
    reply = ChatReply(chat(tools=[ADD]).ask(), HEAD)
    written = Written("so", (ToolCall("add", {"a": 1}, "c1"),), TOKENS, "tool_calls")
    message = reply.whole([written], USAGE)["choices"][0]["message"]
    back = {**message, "annotations": [], "audio": None, "function_call": None}
    assert chat(messages=[back]).ask().messages == (Message.assistant("so", calls=[ToolCall("add", {"a": 1}, "c1")]),)


def test_tool_choices():
    assert chat(tools=[ADD]).ask().tools == (Tool("add", "d", {"type": "object"}),)
    assert chat(tools=[ADD], tool_choice="none").ask().tools == ()
    ask = chat(tools=[ADD], tool_choice="required").ask()
    assert (ask.must_call, ask.must_call_tool) == (True, "")
    ask = chat(tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}}).ask()
    assert (ask.must_call, ask.must_call_tool) == (True, "add")
    with pytest.raises(Refusal, match="tool_choice = 'mul': not among tools"):
        chat(tools=[ADD], tool_choice={"type": "function", "function": {"name": "mul"}}).ask()


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": NaN}', "7"])
def test_arguments_that_are_no_object_are_refused(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(Refusal, match="send a JSON object as text") as refused:
        chat(messages=[{"role": "assistant", "tool_calls": [call]}]).ask()
    assert refused.value.param == "messages.0"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),
    ],
)
def test_prompts_are_text_or_ids_one_or_several(prompt, prompts):
    assert CompletionBody.model_validate({"prompt": prompt}).ask().prompts == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [-1], [2**31], {"a": 1}, [[1], []], [True]])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": prompt})


def test_defaults_are_the_apis():
    assert CompletionBody.model_validate({"prompt": "a"}).ask().max_tokens == 16
    ask = chat().ask()
    assert (ask.max_tokens, ask.count, ask.seed, ask.sampling.temperature, ask.top_logprobs) == (
        None,
        1,
        None,
        1.0,
        None,
    )
    assert chat(max_tokens=3, max_completion_tokens=4).ask().max_tokens == 4


def test_an_error_is_told_at_the_deepest_place_of_the_body():
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}
    with pytest.raises(ValidationError) as wrong:
        ChatBody.model_validate(body)
    refusal = invalid(wrong.value.errors(), body)
    assert refusal.param == "messages.0.content.0.text"
    assert error_body(refusal)["error"] == {
        "message": "messages.0.content.0.text = 3: input should be a valid string",
        "type": "invalid_request_error", "param": "messages.0.content.0.text", "code": None,
    }  # fmt: skip


# -------------------------------------------------------------------------- replies


def test_a_whole_chat_and_its_events_say_the_same():
    ask = chat(n=2, logprobs=True, top_logprobs=2, return_token_ids=True, stream=True,
               stream_options={"include_usage": True}).ask()  # fmt: skip
    call = ToolCall("add", {"a": 1}, "c1")
    pieces = [Written("so", (), TOKENS[:1]), Written("", (call,), TOKENS[1:]), Written("", (), (), "tool_calls")]
    whole = ChatReply(ask, HEAD).whole([pieces[0] + pieces[1] + pieces[2], Written("x", (), (), "stop")], USAGE)
    reply = ChatReply(ask, HEAD)
    events = told([*reply.begin(), *(e for p in pieces for e in reply.news(0, p)), *reply.end(USAGE)])
    deltas = [c for e in events for c in e["choices"] if c["index"] == 0]
    choice = whole["choices"][0]
    assert "".join(d["delta"].get("content", "") for d in deltas) == choice["message"]["content"] == "so"
    calls = [c for d in deltas for c in d["delta"].get("tool_calls", [])]
    assert [{k: v for k, v in c.items() if k != "index"} for c in calls] == choice["message"]["tool_calls"]
    assert [x for d in deltas if d["logprobs"] for x in d["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [i for d in deltas for i in d.get("token_ids", [])] == choice["token_ids"] == [9, 8]
    assert choice["token_logprobs"] == [-0.5, -2.5]
    assert deltas[-1]["prompt_token_ids"] == whole["prompt_token_ids"] == [1, 2]
    assert events[-1]["usage"] == whole["usage"] and all(e["usage"] is None for e in events[:-1])
    assert [x["bytes"] for x in choice["logprobs"]["content"]] == [[97], None]


def test_calls_of_a_stream_are_numbered_within_their_answer():
    reply = ChatReply(chat(tools=[ADD], stream=True).ask(), HEAD)
    events = told(e for i in (0, 1, 0) for e in reply.news(i, Written("", (ToolCall("add", {}, "c"),) * 2)))
    assert [[c["index"] for c in e["choices"][0]["delta"]["tool_calls"]] for e in events] == [[0, 1], [0, 1], [2, 3]]


def test_completion_log_probs_are_parallel_lists():
    ask = CompletionBody.model_validate({"prompt": "a", "logprobs": 2}).ask()
    choice = CompletionReply(ask, HEAD).whole([Written("a\ufffd", (), TOKENS, "stop")], USAGE)["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "\ufffd"], "token_logprobs": [-1.0, -3.0], "top_logprobs": [{"a": -1.0, "b": -2.0}, {}],
        "text_offset": [0, 1],
    }  # fmt: skip


def test_prompt_ids_are_those_of_the_answers_own_prompt():
    ask = CompletionBody.model_validate({"prompt": ["a", "b"], "n": 2, "return_token_ids": True}).ask()
    head = Head("id-1", "m", 7, "f", ((1,), (2,)))
    choices = CompletionReply(ask, head).whole([Written("x", (), (), "stop")] * 4, USAGE)["choices"]
    assert [c["prompt_token_ids"] for c in choices] == [[1], [1], [2], [2]]


def test_an_event_is_one_line_of_json():
    assert event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
