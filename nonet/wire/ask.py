"""What formats have in common: an Ask goes in, Written pieces come out, a Refusal says why not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nonet.types import Message, Sampling, Tool, ToolCall, UserError


class Refusal(UserError):
    """A request that gets an error instead of an answer. status: HTTP's; param: the field at fault."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.kind, self.code, self.param = message, status, kind, code, param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for.

    messages     a conversation to answer, or
    prompts      texts or token ids to continue; exactly one of the two is given
    seed         None: any; the same seed and prompt give the same text
    count        answers for each prompt
    max_tokens   None: as many as the context holds
    top_logprobs None: no log-probs; else how many alternatives are told beside each token's own
    must_call    the answer is a tool call, of must_call_tool where one is named
    one_call     the answer ends after its first tool call
    token_ids    token ids are told beside the text
    echo         the answer begins with the prompt
    scored       the answer is the prompts themselves, with their log-probs; nothing is written
    """

    model: str | None
    sampling: Sampling
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    seed: int | None = None
    count: int = 1
    max_tokens: int | None = None
    stop_texts: tuple[str, ...] = ()
    top_logprobs: int | None = None
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    must_call_tool: str = ""
    one_call: bool = False
    token_ids: bool = False
    echo: bool = False
    scored: bool = False
    stream: bool = False
    usage_event: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. offset: characters of the answer before it; drawn: its log-prob under the distribution it
    was drawn from; logprob and top ((text, log-prob) pairs): under the model's own. logprob None: nothing precedes it.
    """

    id: int
    text: str
    offset: int
    logprob: float | None
    drawn: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What one answer gained: text, calls, and the tokens both are made of; finish says why it is complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[Token, ...] = ()
    finish: str | None = None

    def __add__(self, more: Written) -> Written:
        return Written(self.text + more.text, self.calls + more.calls, self.tokens + more.tokens, more.finish)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. cached: of the prompt; drafted: proposed by a draft, of which `accepted` are in the completion."""

    prompt: int
    completion: int
    cached: int
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """What every body and event of one reply repeats. fingerprint names the weights' version."""

    id: str
    model: str
    created: int
    fingerprint: str
    prompt_ids: tuple[tuple[int, ...], ...] = ()


class Reply(Protocol):
    """A format's way to say an answer: as one body, or as server-sent events."""

    def __init__(self, ask: Ask, head: Head): ...
    def whole(self, answers: Sequence[Written], usage: Usage) -> dict[str, Any]: ...
    def begin(self) -> Iterable[bytes]: ...
    def news(self, index: int, written: Written) -> Iterable[bytes]: ...
    def end(self, usage: Usage) -> Iterable[bytes]: ...
    def broken(self, refusal: Refusal) -> Iterable[bytes]: ...
