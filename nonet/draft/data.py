"""Conversations whose answers a draft will learn from: read from JSON lines, each a turn-by-turn record.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}            OpenAI's and Hugging Face's form
    {"conversations": [{"from": "human", "value": "..."}, ...], "tools": "[...]"}      ShareGPT's form

Owns: the two forms, the id of a conversation and whether it is held out; both follow from what it says alone, so they
survive reordered and grown files. Reasoning (`reasoning_content`), tool calls and tool results are kept.
Refuses, as `FILE line N: FIELD`: preformatted text, which has no turns to learn from, and fields of the wrong kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nonet.types import Message, Part, Reasoning, Role, Text, Tool, ToolCall, ToolResult, UserError

ROLES: dict[str, Role] = {
    **{"system": "system", "developer": "system"},
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_THOUGHT = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation:
    """domain: what reports group by. The assistant's turns say where the target speaks; its own words replace them."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    domain: str = "data"
    heldout: bool = False

    @property
    def turns(self) -> int:
        """How often the target speaks: once for each of the assistant's turns, and after a last word of anyone else."""
        return sum(m.role == "assistant" for m in self.messages) + (self.messages[-1].role != "assistant")


def conversation(
    messages: Iterable[Message], tools: Iterable[Tool] = (), domain: str = "data", heldout: float | bool = False
) -> Conversation:
    """heldout: whether, or for which share of all conversations, chosen by the hash of what comes before the first
    answer, so that no prompt is on both sides.
    """
    messages, tools = tuple(messages), tuple(tools)
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    opening = _number(repr(messages[:first]))
    held = heldout if isinstance(heldout, bool) else opening < heldout * 2**64
    return Conversation(f"{domain}/{_number(repr((messages, tools))):016x}", messages, tools, domain, held)


def unique(conversations: Iterable[Conversation]) -> tuple[list[Conversation], int]:
    """Each id once, in order, and how many were left out as repetitions."""
    given = list(conversations)
    found = {c.id: c for c in given}
    return list(found.values()), len(given) - len(found)


def read(file: Path, heldout: float | bool = 0.05, domain: str = "") -> list[Conversation]:
    """Every conversation of a JSON-lines file; domain: its name without the ending."""
    if not file.is_file():
        raise UserError(f"data {file}: no such file; give a .jsonl file of conversations")
    found = [conversation(*_record(record, where), domain or file.stem, heldout) for record, where in _lines(file)]
    if not found:
        raise UserError(f"data {file}: holds no conversation; write one JSON object a line")
    return found


def _lines(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with file.open("rb") as f:
        for number, line in enumerate(f, 1):
            where = f"{file} line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as e:  # also UnicodeDecodeError
                raise UserError(f"{where}: not JSON in UTF-8 ({e}); write one object a line") from e
            if not isinstance(record, dict):
                raise UserError(f"{where}: is a {type(record).__name__}; write an object with `messages`")
            yield record, where


def _record(record: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    field = next((f for f in ("messages", "conversations") if f in record), None)
    if field is None:
        has = ", ".join(map(str, record))[:80] or "nothing"
        hint = "; text that is already formatted has no turns to mask" if {"text", "prompt"} & record.keys() else ""
        raise UserError(f"{where}: neither `messages` nor `conversations` (has {has}){hint}; give the turns")
    turns = record[field]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: {field} = {_short(turns)}: must be a list of turns")
    messages = tuple(_message(turn, f"{where}: {field}.{i}") for i, turn in enumerate(turns))
    spoken = [m.role for m in messages if m.role != "system"]
    if not spoken or spoken[0] != "user":
        raise UserError(f"{where}: {field}: must begin with the user's words; remove what comes before them")
    return messages, _tools(record.get("tools"), where)


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{where} = {_short(turn)}: must be an object with role and content")
    key, body = ("role", "content") if "role" in turn else ("from", "value")
    name = turn.get(key)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise UserError(f"{where}.{key} = {_short(name)}: must be one of {', '.join(ROLES)}")
    text = _text(turn.get(body), f"{where}.{body}")
    if name == "function_call":
        return Message(role, (_call(_json(text, f"{where}.{body}"), f"{where}.{body}"),))
    if role == "tool":
        return Message(role, (ToolResult(text, call=str(turn.get("tool_call_id") or "")),))
    thought = next((turn[f] for f in _THOUGHT if turn.get(f)), "")
    parts: tuple[Part, ...] = (Reasoning(_text(thought, f"{where}.{_THOUGHT[0]}")),) if thought else ()
    parts += (Text(text),) if text else ()
    calls = tuple(_call(c, f"{where}.tool_calls.{i}") for i, c in enumerate(turn.get("tool_calls") or ()))
    if calls and role != "assistant":
        raise UserError(f"{where}.tool_calls: only an assistant's turn may have them; leave them out")
    if not (parts or calls):
        raise UserError(f"{where}.{body}: is empty; give text or remove the turn")
    return Message(role, parts + calls)


def _text(value: Any, where: str) -> str:
    """A string, nothing, or a list of {"type": "text", "text": ...}."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in value]
        if all(isinstance(t, str) for t in texts):
            return "".join(t for t in texts if t is not None)
    raise UserError(f"{where} = {_short(value)}: must be text (images and sound are not read)")


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} = {_short(call)}: a tool call needs a name and arguments")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise UserError(f"{where}.arguments = {_short(arguments)}: must be an object")
    return ToolCall(function["name"], arguments, str(call.get("id") or ""))


def _tools(value: Any, where: str) -> tuple[Tool, ...]:
    """OpenAI's list of functions, or the same as JSON text."""
    listed = _json(value, f"{where}: tools") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(listed, list):
        raise UserError(f"{where}: tools = {_short(value)}: must be a list")
    out = []
    for i, entry in enumerate(listed):
        f = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(f, dict) or not isinstance(f.get("name"), str):
            raise UserError(f"{where}: tools.{i} = {_short(entry)}: a tool needs a name")
        schema = f.get("parameters") or {"type": "object", "properties": {}}
        out.append(Tool(f["name"], str(f.get("description") or ""), schema))
    return tuple(out)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise UserError(f"{where} = {_short(text)}: not JSON ({e}); correct it") from e


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
