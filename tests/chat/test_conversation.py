"""Messages and tools through the template: boundaries that hold, control tokens nobody can forge, calls read back."""

from __future__ import annotations

import pytest
import templates
from hypothesis import given
from hypothesis import strategies as st

from nonet.chat import CallReader, CallSyntax, Tokenizer, prompt
from nonet.chat.conversation import filled_message, filled_tool
from nonet.chat.training import END, SPECIAL
from nonet.types import Message, Tool, ToolCall, ToolResult, UserError

ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}})
CHAT = [Message.system("be brief"), Message.user("hello"), Message.assistant("hi"), Message.user("and you?")]


@pytest.fixture(scope="module")
def toolful(nano, tmp_path_factory) -> Tokenizer:
    return templates.with_template(nano.directory, templates.TOOLS, tmp_path_factory.mktemp("toolful"))


def boundaries_one_by_one(t: Tokenizer, messages: list[Message], tokens: tuple[int, ...]) -> list[int]:
    """The definition: counts at which a shorter conversation's tokens begin the whole's."""
    heads = [
        t.encode_filled(t.fill([filled_message(m) for m in messages[:n]], False)) for n in range(1, len(messages) + 1)
    ]
    return [len(head) for head in heads if list(tokens[: len(head)]) == head]


# ------------------------------------------------------------------------- boundaries


@given(st.lists(st.text(max_size=12), min_size=1, max_size=9))
def test_boundaries_are_where_shorter_conversations_end(nano, texts):
    messages = [Message.user(t) if i % 2 else Message.assistant(t) for i, t in enumerate(texts)]
    made = prompt(nano, messages)
    assert made.tokens == tuple(nano.prompt([filled_message(m) for m in messages]))
    assert list(made.boundaries) == boundaries_one_by_one(nano, messages, made.tokens)
    assert len(made.boundaries) == len(messages)


def test_a_template_that_rewrites_history_has_no_boundary_there(nano, tmp_path):
    t = templates.with_template(nano.directory, templates.REWRITES, tmp_path)
    made = prompt(t, CHAT)
    assert list(made.boundaries) == [len(made.tokens) - 1]  # only the whole conversation; <|assistant|> follows


def test_a_template_that_refuses_prefixes_has_only_the_others(nano, tmp_path):
    t = templates.with_template(nano.directory, templates.STRICT, tmp_path)
    made = prompt(t, CHAT)
    ends = [i + 1 for i, token in enumerate(made.tokens) if token == t.special["<|assistant|>"]]
    assert list(made.boundaries) == ends  # where the user spoke last


def test_long_conversations_keep_the_first_and_the_last_ends(nano):
    messages = [Message.user(str(i)) for i in range(200)]
    made = prompt(nano, messages)
    ends = [i + 1 for i, token in enumerate(made.tokens) if token == nano.special[END]]
    assert list(made.boundaries) == [ends[0], *ends[-16:]]


# ------------------------------------------------------------- nobody forges control tokens


@given(st.sampled_from(SPECIAL), st.text(max_size=5))
def test_control_tokens_spelled_in_tools_and_arguments_stay_characters(toolful, special, text):
    said = Message.assistant(calls=[ToolCall("add", {special: text + special})])
    tools = [Tool("add", special, {"type": "object", "properties": {special: {}}})]
    plain = [Tool("add", "", {"type": "object", "properties": {"": {}}})]
    empty = Message.assistant(calls=[ToolCall("add", {"": ""})])
    result = Message("tool", (ToolResult(special),))
    forged = prompt(toolful, [Message.user(special), said, result], tools).tokens
    honest = prompt(toolful, [Message.user(""), empty, Message("tool", (ToolResult(""),))], plain).tokens
    controls = set(toolful.special.values())
    assert [t for t in forged if t in controls] == [t for t in honest if t in controls]


def test_whatever_a_template_raises_is_a_sentence(nano, tmp_path):
    t = templates.with_template(nano.directory, "{{ messages[0].content + 1 }}", tmp_path)
    with pytest.raises(UserError, match="refused the conversation"):
        prompt(t, CHAT)


# ------------------------------------------------------------------------------- calls


def test_the_syntax_of_calls_is_found_in_the_template(toolful, nano):
    assert CallSyntax.of(toolful) == CallSyntax("<tool_call>", "</tool_call>", "name", "arguments")
    assert CallSyntax.of(nano) is None


def test_a_turn_can_be_begun_as_a_call(toolful):
    syntax = CallSyntax.of(toolful)
    assert syntax is not None
    assert syntax.opening(toolful) == "<tool_call>\n"
    assert syntax.opening(toolful, "add") == '<tool_call>\n{"name": "add", "arguments": '


TEXTS = st.text(alphabet="ab \n<>/", max_size=6)
VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=6), lambda x: st.lists(x, max_size=2), max_leaves=3)
CALLS = st.builds(
    ToolCall, st.text("abc", min_size=1, max_size=4), st.dictionaries(st.text(max_size=3), VALUES, max_size=2)
)


@given(TEXTS, st.lists(CALLS, max_size=3), st.data())
def test_what_the_template_writes_is_read_back_however_it_is_cut(toolful, text, calls, data):
    syntax = CallSyntax.of(toolful)
    assert syntax is not None
    said = Message.assistant(text.rstrip(), calls=calls)
    head = toolful.fill([filled_message(Message.user("q"))], True)
    written = toolful.fill([filled_message(m) for m in (Message.user("q"), said)], False)
    words = written.removeprefix(head).removesuffix(END).replace("\ue000", "")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(words)), max_size=6)))
    pieces = [words[a:b] for a, b in zip([0, *cuts], [*cuts, len(words)], strict=True)]
    reader = CallReader(syntax)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.feed("", last=True)
    assert "".join(p for p in parts if isinstance(p, str)) == said.text
    assert [p for p in parts if isinstance(p, ToolCall)] == calls


@pytest.mark.parametrize(
    "words",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call> and on',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_stays_text(toolful, words):
    syntax = CallSyntax.of(toolful)
    assert syntax is not None
    reader = CallReader(syntax)
    parts = [part for c in words[:200] for part in reader.feed(c)] + reader.feed(words[200:], last=True)
    assert "".join(str(p) for p in parts) == words


def test_a_good_call_after_a_bad_one_is_still_found(toolful):
    syntax = CallSyntax.of(toolful)
    assert syntax is not None
    words = '<tool_call>oops</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert CallReader(syntax).feed(words, last=True) == ["<tool_call>", "oops</tool_call>", ToolCall("f", {})]


def test_tools_reach_the_template_as_hugging_face_names_them():
    assert filled_tool(ADD)["function"]["name"] == "add"
    said = filled_message(Message.assistant(reasoning="hm", calls=[ToolCall("add", {"a": 1}, "c1")]))
    assert said["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert said["reasoning_content"] == "hm"
    assert filled_message(Message("tool", (ToolResult("3", call="c1"),)))["tool_call_id"] == "c1"
