"""POST /v1/chat/completions of the OpenAI API: a conversation, answered; tool calls both ways."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nonet.types import Message, Part, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from nonet.wire.ask import Ask, Head, Refusal, Token, Usage, Written
from nonet.wire.openai import MOST_TOP_LOGPROBS, Body, OpenAIReply, usage_body

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str


class Call(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """One turn. Fields an assistant's reply came with may be sent back as they were."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())

    def message(self, place: str) -> Message:
        """Refusal where a field has no place in a message of this role."""
        for field in ("reasoning_content", "tool_calls"):
            if self.role != "assistant" and getattr(self, field):
                raise Refusal(f"{place}.{field}: only an assistant's message may have it; leave it out", param=place)
        if self.name is not None and self.role != "tool":
            raise Refusal(
                f"{place}.name = {self.name[:40]!r}: names of speakers are not served; leave it out", param=place
            )
        if self.content is None and not self.tool_calls:
            raise Refusal(f"{place}.content: missing; give text, if only an empty one", param=place)
        if self.role == "tool":
            return Message("tool", (ToolResult(self.text, call=self.tool_call_id or ""),))
        role: Role = "system" if self.role == "developer" else self.role
        parts: tuple[Part, ...] = (Reasoning(self.reasoning_content),) if self.reasoning_content else ()
        parts += (Text(self.text),) if self.text else ()
        return Message(role, parts + tuple(_call(c, place) for c in self.tool_calls or ()))


class Function(Strict):
    name: Name
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: Literal[False] | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: str


class Chosen(Strict):
    type: Literal["function"]
    function: ChosenFunction


class TextFormat(Strict):
    type: Literal["text"]


class ChatBody(Body):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[FunctionTool] = Field([], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | Chosen = "auto"
    parallel_tool_calls: bool = True
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None

    def ask(self) -> Ask:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs: only with logprobs = true; set it, or leave this out", param="top_logprobs")
        tools = tuple(Tool(t.function.name, t.function.description, t.function.parameters) for t in self.tools)
        return Ask(
            **self.shared(),
            messages=tuple(m.message(f"messages.{i}") for i, m in enumerate(self.messages)),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            tools=() if self.tool_choice == "none" else tools,
            must_call=self.tool_choice not in ("auto", "none"),
            must_call_tool=self._chosen(),
            one_call=not self.parallel_tool_calls,
        )

    def _chosen(self) -> str:
        """The tool that must be called, if it is a certain one."""
        if self.tool_choice == "required" and not self.tools:
            raise Refusal(
                "tool_choice = 'required': there are no tools; give some, or leave it out", param="tool_choice"
            )
        if isinstance(self.tool_choice, str):
            return ""
        name = self.tool_choice.function.name
        if name not in {t.function.name for t in self.tools}:
            raise Refusal(f"tool_choice = {name[:64]!r}: not among tools; name one of them", param="tool_choice")
        return name


def _call(call: Call, place: str) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("not an object")
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as e:
        text = call.function.arguments
        raise Refusal(
            f"{place}.tool_calls: arguments = {text[:40]!r}: {e}; send a JSON object as text", param=place
        ) from e
    return ToolCall(call.function.name, arguments, call.id)


class ChatReply(OpenAIReply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, ask: Ask, head: Head):
        super().__init__(ask, head)
        self._calls: Counter[int] = Counter()  # told so far, by answer

    def whole(self, answers: Sequence[Written], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(i, a) for i, a in enumerate(answers)]
        return {**self.envelope(self.object, choices), "usage": usage_body(usage), **self._prompt_ids()}

    def begin(self) -> Iterable[bytes]:
        for i in range(self.ask.count):
            first = {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield self.chunk([first])

    def news(self, index: int, written: Written) -> Iterable[bytes]:
        """The prompt's ids, where asked for, come with the last event of an answer."""
        delta: dict[str, Any] = {"content": written.text} if written.text else {}
        if written.calls:
            before = self._calls[index]
            self._calls[index] += len(written.calls)
            delta["tool_calls"] = [{"index": i, **_call_body(c)} for i, c in enumerate(written.calls, before)]
        prompt = self._prompt_ids() if written.finish else {}
        yield self.chunk([{"index": index, "delta": delta, **self._rest(written), **prompt}])

    def _choice(self, index: int, written: Written) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        if written.calls:
            message |= {"content": written.text or None, "tool_calls": [_call_body(c) for c in written.calls]}
        return {"index": index, "message": message, **self._rest(written)}

    def _rest(self, written: Written) -> dict[str, Any]:
        asked = self.ask.top_logprobs is not None
        return {
            "logprobs": {"content": [_logprob(t) for t in written.tokens], "refusal": None} if asked else None,
            "finish_reason": written.finish,
            **self.ids(written),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.head.prompt_ids[0])} if self.ask.token_ids else {}


def _call_body(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprob(token: Token) -> dict[str, Any]:
    top = [{"token": text, "logprob": p, "bytes": _bytes(text)} for text, p in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": _bytes(token.text), "top_logprobs": top}


def _bytes(text: str) -> list[int] | None:
    """None for a token that is a piece of a character: alone it has no text."""
    return None if "\ufffd" in text else list(text.encode())
