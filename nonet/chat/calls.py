"""How a model's chat template writes tool calls, found by filling it with a probe; and calls read back as text arrives.

Served are templates that write each call as one JSON object, a name before its arguments, between two marks
(`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and its relatives). A template of another kind has no
syntax here, and a request with tools must be refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nonet.chat.conversation import filled_message, filled_tool
from nonet.chat.stream import unfinished
from nonet.chat.tokenizer import Tokenizer
from nonet.types import Message, Tool, ToolCall, UserError

_NAME, _KEY = "probe_tool", "probe_key"
_ARGUMENTS = {_KEY: "probe value"}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """open and close: the marks around a call; name and arguments: the keys of its JSON object."""

    open: str
    close: str
    name: str
    arguments: str

    @staticmethod
    def of(tokenizer: Tokenizer) -> CallSyntax | None:
        """None where the template shows no tools, or writes no calls in the form above."""
        try:
            shows_tools = _NAME in tokenizer.fill([filled_message(Message.user("q"))], True, [_tool(_NAME)])
            one, two = _filled(tokenizer, _NAME, 1), _filled(tokenizer, _NAME, 2)
        except UserError:
            return None
        only, first = _probe_object(one, 0), _probe_object(two, 0)
        second = first and _probe_object(two, first.end)
        if not (shows_tools and only and first and second):
            return None
        close = one[only.end :].partition(_turn_end(tokenizer))[0].strip()
        between = two[first.end : second.begin].strip()
        opening = between.removeprefix(close).strip()
        if not (close and opening and between.startswith(close)):
            return None
        return CallSyntax(opening, close, only.name, only.arguments)

    def opening(self, tokenizer: Tokenizer, name: str = "") -> str:
        """Filled text that begins a call: up to its arguments, or without a name up to its JSON object. An assistant's
        turn that begins so can only go on as a call.
        """
        text = _filled(tokenizer, name or _NAME, 1)
        key = text.rindex(f'"{_KEY}"')
        mark = text.rindex(self.open, 0, key)
        return text[mark : text.rindex("{", 0, key) if name else text.index("{", mark + len(self.open))]


class CallReader:
    """Splits an assistant's words into text and calls as they arrive.

    Text that may begin a call waits, with the blanks before it; a call is handed over whole. What stands between the
    marks and cannot be read stays text. Blanks around calls are the template's, not the text's.
    """

    def __init__(self, syntax: CallSyntax):
        self.syntax = syntax
        self._pending, self._after_call = "", False

    def feed(self, text: str, last: bool = False) -> list[str | ToolCall]:
        self._pending += text
        return list(self._parts(last))

    def _parts(self, last: bool) -> Iterator[str | ToolCall]:
        mark = self.syntax.open
        while (at := self._pending.find(mark)) >= 0:
            read = self._call(at + len(mark))
            if read is not None:
                call, end = read
                before, self._pending = self._pending[:at].rstrip(), self._pending[end:]
                if before:
                    yield before
                self._after_call = True
                yield call
            elif last:
                yield from self._text(at + len(mark))
            else:
                yield from self._text(len(self._pending[:at].rstrip()))
                return
        waits = unfinished(self._pending, mark)
        certain = len(self._pending) if last else len(self._pending[: len(self._pending) - waits].rstrip())
        if not (last and self._after_call and self._pending.isspace()):
            yield from self._text(certain)

    def _text(self, count: int) -> Iterator[str]:
        text, self._pending = self._pending[:count], self._pending[count:]
        if text:
            self._after_call = False
            yield text

    def _call(self, begin: int) -> tuple[ToolCall, int] | None:
        """The call whose JSON begins here, and where its closing mark ends. The mark may also stand inside a string."""
        close = self.syntax.close
        end = self._pending.find(close, begin)
        while end >= 0:
            call = self._read(self._pending[begin:end])
            if call is not None:
                return call, end + len(close)
            end = self._pending.find(close, end + 1)
        return None

    def _read(self, body: str) -> ToolCall | None:
        try:
            data = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return None
        if not isinstance(data, dict):
            return None
        name, arguments = data.get(self.syntax.name), data.get(self.syntax.arguments, {})
        return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


@dataclass(frozen=True, slots=True)
class _Probe:
    """A probe call found in filled text, and the keys it was written with."""

    begin: int
    end: int
    name: str
    arguments: str


def _probe_object(text: str, start: int) -> _Probe | None:
    """The first JSON object from `start` on that holds the probe's name, then its arguments."""
    begin = text.find("{", start)
    while begin >= 0:
        try:
            data, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            data, end = {}, begin
        keys = [k for value in (_NAME, _ARGUMENTS) for k, v in data.items() if v == value]
        if len(keys) == 2 and text.index(_NAME, begin) < text.index(_KEY, begin):
            return _Probe(begin, end, *keys)
        begin = text.find("{", begin + 1)
    return None


def _filled(tokenizer: Tokenizer, name: str, calls: int) -> str:
    """A conversation that ends in calls of a tool of this name, filled in."""
    said = Message.assistant(calls=[ToolCall(name, _ARGUMENTS, f"call_{i}") for i in range(calls)])
    return tokenizer.fill([filled_message(m) for m in (Message.user("q"), said)], False, [_tool(name)])


def _tool(name: str) -> dict[str, Any]:
    return filled_tool(Tool(name, "", {"type": "object", "properties": {}}))


def _turn_end(tokenizer: Tokenizer) -> str:
    return next(text for text, i in tokenizer.special.items() if i == tokenizer.turn_end)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
