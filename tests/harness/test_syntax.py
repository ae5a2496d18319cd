"""Law 12: render then parse is identity; what cannot be read comes back as an error, never as an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nonet.harness import load_spec, parse_assistant, phrases, render_assistant
from nonet.types import HarnessSpec, Message, Reasoning, Text, ToolCall

SPECS = [
    load_spec("terse"),
    load_spec("plain"),
    HarnessSpec("brackets", call_open="[[", call_close="]]", think_open="((", think_close="))"),
    HarnessSpec("regex", call_open="(.*", call_close="$)", think_open="a|b", think_close="\\"),
    HarnessSpec("lines", call_open="```json\n", call_close="\n```", think_open="Thought: ", think_close="\n---\n"),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)

free_text = st.text(alphabet='ab <>/{}"\\n\n\té漢|[(`:-', min_size=1, max_size=15)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | free_text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(free_text, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ToolCall, free_text, st.dictionaries(free_text, json_values, max_size=2))
parts = st.lists(st.builds(Text, free_text) | st.builds(Reasoning, free_text | st.just("")) | calls, max_size=4)


@every_spec
@settings(max_examples=60)
@given(parts=parts)
@example(parts=[])
@example(parts=[Reasoning("a < b\n"), Text("\n"), ToolCall("f", {})])
def test_what_renders_reads_back_as_the_same_message(spec, parts):
    message = Message("assistant", tuple(parts))
    try:
        text = render_assistant(message, spec)
    except ValueError:
        return  # refused; the next test says when that may happen
    assert parse_assistant(text, spec) == (message, None)


def marks(spec: HarnessSpec) -> tuple[str, ...]:
    return spec.call_open, spec.call_close, spec.think_open, spec.think_close


@pytest.mark.parametrize("spec", [s for s in SPECS if s.name != "regex"], ids=lambda s: s.name)
@settings(max_examples=60)
@given(
    said=st.text(alphabet="xyz 01,.!?é漢\t", min_size=1, max_size=12),
    thought=st.text(alphabet="xyz 01,.é?", max_size=12),
    call=calls,
)
def test_ordinary_messages_are_never_refused(spec, said, thought, call):
    """One reasoning, one text, any number of calls: refused only if a part contains one of the marks itself."""
    message = Message("assistant", (Reasoning(thought), Text(said), call, call))
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    if any(mark in body for mark in marks(spec)):
        return
    assert parse_assistant(render_assistant(message, spec), spec) == (message, None)


@every_spec
def test_a_mark_inside_a_part_is_refused_not_bent(spec):
    inside = [
        Message.assistant(f"x{spec.call_open}y"),
        Message.assistant("x", reasoning=f"a{spec.think_close}b"),
        Message("assistant", (Text("a"), Text("b"))),
        Message("assistant", (Text(""),)),
    ]
    for message in inside:
        with pytest.raises(ValueError, match="does not survive harness"):
            render_assistant(message, spec)


def test_reasoning_may_mention_a_call_without_making_it():
    spec = load_spec("terse")
    message, error = parse_assistant("<think>I could <call>{</call> it</think>ok", spec)
    assert (message, error) == (Message.assistant("ok", reasoning="I could <call>{</call> it"), None)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", '{"name": "...", "arguments": {...}}'),
        ('{"arguments": {}}', '{"name": "...", "arguments": {...}}'),
        ('{"name": 3}', '{"name": "...", "arguments": {...}}'),
        ('{"name": "f", "arguments": [1]}', "must be a JSON object"),
        ('{"name": "\\ud800", "arguments": 3}', "must be a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "not JSON"),
        ('{"name": "f", "arguments": {"x": ' + "1" * 5000, "not JSON"),
    ],
    ids=[
        "empty",
        "open",
        "list",
        "no name",
        "name",
        "arguments",
        "surrogate",
        "deep",
        "long number",
        "long number, cut",
    ],
)
def test_a_malformed_call_is_an_error_sentence_that_any_tokenizer_can_read(body, complaint):
    message, error = parse_assistant(f"before<call>{body}</call>after", load_spec("terse"))
    assert message == Message("assistant", (Text("before"), Text("after")))
    assert error is not None
    assert complaint in error
    assert len(error) < 300
    error.encode()  # no half surrogates on the way back to the policy


def test_a_call_without_arguments_and_one_cut_off_by_the_end_of_the_turn():
    spec = load_spec("terse")
    assert parse_assistant('<call>{"name": "f"}</call>', spec) == (Message.assistant(calls=[ToolCall("f", {})]), None)
    message, error = parse_assistant('<call>{"name": "f", "argu', spec)
    assert message.calls == ()
    assert error is not None


def test_the_first_error_is_reported_and_the_good_calls_are_kept():
    message, error = parse_assistant('<call>1</call><call>{"name": "f"}</call><call>{</call>', load_spec("terse"))
    assert [c.name for c in message.calls] == ["f"]
    assert error is not None
    assert "needs" in error


@given(text=st.text(alphabet="<call>/think{}\"':,na me[1]\\u\n", max_size=80))
@settings(max_examples=150)
def test_no_text_whatever_raises(text):
    for spec in SPECS:
        message, error = parse_assistant(text, spec)
        assert message.role == "assistant"
        assert error is None or error


def test_phrases_are_the_fixed_text_of_every_call():
    spec = load_spec("terse")
    text = render_assistant(Message.assistant("x", "why", [ToolCall("f", {"a": "b", "c": "d"})]), spec)
    for phrase in phrases(spec):
        text = text.replace(phrase, "\0")
    assert sorted(text.replace("\0", " ").split()) == ["a", "b", "c", "d", "f", "why", "x"]
