"""Tools: shown through the template, called in OpenAI's form whole and streamed, results sent back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from running import running
from typist import Typist

from nonet.chat import Tokenizer
from nonet.serve import make_app

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": n, "description": f"Tool {n}.", "parameters": {"type": "object"}}}
    for n in ("add", "look")
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def asked(t: Tokenizer, words: str, act: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> tuple[Any, Typist]:
    """What a client's act returns where the model says `words` and ends its turn; and the model."""
    typist = Typist(lambda _: [*t.encode(words), t.turn_end], t.decode)

    async def run() -> Any:
        async with (
            running(make_app(typist, t, "m")) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        ):
            return await act(client)

    return asyncio.run(run()), typist


def ask(**more: Any) -> Callable[[openai.AsyncOpenAI], Awaitable[Any]]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS, **more}
    return lambda client: client.chat.completions.create(**body)


def streamed(**more: Any) -> Callable[[openai.AsyncOpenAI], Awaitable[Any]]:
    async def act(client: openai.AsyncOpenAI) -> list[Any]:
        return [chunk.choices[0] async for chunk in await ask(stream=True, **more)(client)]

    return act


def test_calls_are_told_in_openais_form(toolful):
    answer, typist = asked(toolful, f"Well.\n{CALL}\n{OTHER}", ask())
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == [("add", {"a": 1, "b": "é"}), ("look", {})]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert "Tool look." in toolful.decode(typist.requests[0].tokens)


def test_streamed_calls_are_the_whole_ones(toolful):
    parts, _ = asked(toolful, f"Well.\n{CALL}\n{OTHER}", streamed())
    calls = [c for p in parts for c in p.delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in calls] == [(0, "add"), (1, "look")]
    assert json.loads(calls[0].function.arguments) == {"a": 1, "b": "é"}
    assert "".join(p.delta.content or "" for p in parts) == "Well."
    assert parts[-1].finish_reason == "tool_calls"


def test_a_broken_call_stays_text(toolful):
    answer, _ = asked(toolful, '<tool_call>{"name": "add", </tool_call>', ask())
    assert answer.choices[0].message.content == '<tool_call>{"name": "add", </tool_call>'
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_one_ends_the_answer(toolful, stream):
    act = (streamed if stream else ask)(parallel_tool_calls=False)
    told, typist = asked(toolful, f"{CALL}{OTHER}", act)
    if stream:
        calls = [c for p in told for c in p.delta.tool_calls or ()]
    else:
        calls = told.choices[0].message.tool_calls
        assert told.usage.completion_tokens == len(toolful.encode(CALL))
    assert [c.function.name for c in calls] == ["add"]
    assert not typist.busy


def test_a_tool_that_must_be_called_is_begun_for_the_model(toolful):
    choose = {"type": "function", "function": {"name": "look"}}
    answer, typist = asked(toolful, '{"x": 1}}\n</tool_call>', ask(tool_choice=choose))
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"x": 1})
    assert answer.choices[0].message.content is None
    opening = '<|assistant|><tool_call>\n{"name": "look", "arguments": '
    assert toolful.decode(typist.requests[0].tokens).endswith(opening)


def test_some_tool_must_be_called(toolful):
    answer, typist = asked(toolful, '{"name": "add", "arguments": {}}</tool_call>', ask(tool_choice="required"))
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert toolful.decode(typist.requests[0].tokens).endswith("<|assistant|><tool_call>\n")


def test_with_tool_choice_none_tools_are_neither_shown_nor_read(toolful):
    answer, typist = asked(toolful, CALL, ask(tool_choice="none"))
    assert answer.choices[0].message.content == CALL
    assert "Tool look." not in toolful.decode(typist.requests[0].tokens)


def test_results_come_back_through_the_template(toolful):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "three"}]},
    ]
    _, typist = asked(toolful, "done", ask(messages=messages))
    prompt = typist.requests[0]
    text = toolful.decode(prompt.tokens)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|><|tool|>three<|end|>' in text
    assert len(prompt.boundaries) == 3


def test_tools_without_a_place_in_the_template_are_refused(nano):
    with pytest.raises(openai.BadRequestError, match="the model's chat template shows no tools"):
        asked(nano, "x", ask())
