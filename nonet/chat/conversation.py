"""Messages and tools through a model's own chat template: prompt tokens, and where in them each message ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nonet.chat.tokenizer import Tokenizer
from nonet.types import Message, Tool, ToolResult, UserError

# Beside the first message's end, those of so many last ones: earlier turns were last ones in earlier requests, and
# filling the template for every prefix costs the square of the conversation.
_LAST_ENDS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """boundaries: ascending counts of tokens at which messages end, those that could be made sure of."""

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


def prompt(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), opening: str = "") -> Prompt:
    """Tokens after which the assistant speaks. opening: filled text the assistant's turn begins with.

    UserError where the directory has no template or its template refuses the conversation.
    """
    filled, offered = [filled_message(m) for m in messages], [filled_tool(t) for t in tools]
    text = tokenizer.fill(filled, True, offered) + opening
    tokens = tokenizer.encode_filled(text)
    return Prompt(tuple(tokens), _boundaries(tokenizer, filled, offered, text, tokens))


def filled_message(message: Message) -> dict[str, Any]:
    """The message as chat templates know it (Hugging Face's convention: arguments are an object, not text)."""
    results = [p for p in message.parts if isinstance(p, ToolResult)]
    out: dict[str, Any] = {"role": message.role, "content": message.text + "".join(r.text for r in results)}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.calls
        ]
    if results and results[0].call:
        out["tool_call_id"] = results[0].call
    return out


def filled_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _boundaries(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    text: str,
    tokens: Sequence[int],
) -> tuple[int, ...]:
    """Ends of messages: the conversation cut there fills to a beginning of `text` whose tokens begin `tokens`.

    A template that writes earlier turns differently once later ones exist, or a tokenizer that merges across the end,
    has no boundary there.
    """
    ends: list[int] = []
    before, count = "", 0
    for n in sorted({1, *range(max(1, len(messages) - _LAST_ENDS + 1), len(messages) + 1)}):
        try:
            head = tokenizer.fill(messages[:n], False, tools)
        except UserError:  # a template may refuse an unfinished conversation: then nobody can share it
            continue
        if not (text.startswith(head) and len(head) > len(before) and head.startswith(before)):
            continue
        piece = tokenizer.encode_filled(head[len(before) :])
        if list(tokens[count : count + len(piece)]) == piece:
            before, count = head, count + len(piece)
            ends.append(count)
    return tuple(ends)
