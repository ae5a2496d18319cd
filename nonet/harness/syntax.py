"""An assistant's turn as text under a spec, and back: `parse_assistant(render_assistant(m)) == m` (law 12).

A call that cannot be read is not dropped: it comes back as an error sentence, which the episode shows to the policy.
"""

from __future__ import annotations

import json
import re

from nonet.types import HarnessSpec, Message, Part, Reasoning, Text, ToolCall


def render_assistant(message: Message, spec: HarnessSpec) -> str:
    """Text of an assistant message: reasoning between think marks, calls as compact JSON between call marks.

    Raises ValueError where the text would not read back as the same message (a mark inside a part).
    """
    out = []
    for part in message.parts:
        if isinstance(part, Reasoning):
            out.append(spec.think_open + part.text + spec.think_close)
        elif isinstance(part, ToolCall):
            body = json.dumps({"name": part.name, "arguments": dict(part.arguments)}, ensure_ascii=False)
            out.append(spec.call_open + body + spec.call_close)
        else:
            out.append(part.text)
    text = "".join(out)
    if parse_assistant(text, spec) != (message, None):
        raise ValueError(f"message does not survive harness {spec.name!r}: {message!r}")
    return text


def parse_assistant(text: str, spec: HarnessSpec) -> tuple[Message, str | None]:
    """(message, error). The error names the first unreadable call; parts before and after it are kept."""
    o, c, to, tc = (re.escape(m) for m in (spec.call_open, spec.call_close, spec.think_open, spec.think_close))
    parts: list[Part] = []
    error, at = None, 0
    for match in re.finditer(f"{to}(?P<think>.*?){tc}|{o}(?P<call>.*?)(?:{c}|$)", text, re.DOTALL):
        _add_text(parts, text[at : match.start()])
        at = match.end()
        if match["think"] is not None:
            parts.append(Reasoning(match["think"]))
            continue
        call = _read_call(match["call"])
        if isinstance(call, ToolCall):
            parts.append(call)
        else:
            error = error or call
    _add_text(parts, text[at:])
    return Message("assistant", tuple(parts)), error


def phrases(spec: HarnessSpec) -> list[str]:
    """The fixed strings that calls and reasoning are written with, for a tokenizer trained for this harness."""
    call = render_assistant(Message.assistant(calls=[ToolCall("\0", {"\1": "\2"})]), spec)
    marks = re.split("|".join(re.escape(json.dumps(c)[1:-1]) for c in "\0\1\2"), call)
    return [*marks, '", "', spec.think_open, spec.think_close]


def _add_text(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Text(text))


def _read_call(body: str) -> ToolCall | str:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as e:  # not only JSONDecodeError: a number may have too many digits
        return f"the tool call is not JSON: {e}"
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return 'a tool call needs {"name": "...", "arguments": {...}}'
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of {data['name'][:40]!r} must be a JSON object"
    return ToolCall(data["name"], arguments)
