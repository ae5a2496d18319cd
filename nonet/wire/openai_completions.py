"""POST /v1/completions of the OpenAI API: text or token ids, continued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from nonet.wire.ask import Ask, Refusal, Usage, Written
from nonet.wire.openai import MOST_TOP_LOGPROBS, Body, OpenAIReply, usage_body

_MAX_TOKENS = 16  # the API's own default for this format
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Several = Annotated[list[str | Ids], Field(min_length=1)]


class CompletionBody(Body):
    """prompt: text, token ids, or a list of either. max_tokens 0, with echo and logprobs: score the prompt."""

    prompt: str | Ids | Several
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def ask(self) -> Ask:
        scored = self.echo and self.logprobs is not None
        if scored != (self.max_tokens == 0) or (scored and (self.n > 1 or self.stream)):
            raise Refusal(
                "max_tokens: 0 scores the prompt, which takes echo and logprobs, max_tokens = 0, n = 1 and no stream; "
                "for an answer, ask for at least 1 token and leave out echo or logprobs",
                param="max_tokens",
            )
        prompts = [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt
        return Ask(
            **self.shared(),
            prompts=tuple(p if isinstance(p, str) else tuple(p) for p in prompts),  # pyright: ignore[reportArgumentType]
            max_tokens=self.max_tokens or _MAX_TOKENS,
            top_logprobs=self.logprobs,
            echo=self.echo,
            scored=scored,
        )


class CompletionReply(OpenAIReply):
    object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, answers: Sequence[Written], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(i, a) for i, a in enumerate(answers)]
        for i, choice in enumerate(choices):
            choice |= self._prompt_ids(i)
        return {**self.envelope(self.object, choices), "usage": usage_body(usage)}

    def begin(self) -> Iterable[bytes]:
        return ()

    def news(self, index: int, written: Written) -> Iterable[bytes]:
        """The prompt's ids, where asked for, come with the last event of an answer."""
        ids = self._prompt_ids(index) if written.finish else {}
        yield self.chunk([{**self._choice(index, written), **ids}])

    def _choice(self, index: int, written: Written) -> dict[str, Any]:
        return {
            "index": index,
            "text": written.text,
            "logprobs": None if self.ask.top_logprobs is None else _logprobs(written),
            "finish_reason": written.finish,
            **self.ids(written),
        }

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.head.prompt_ids[index // self.ask.count])} if self.ask.token_ids else {}


def _logprobs(written: Written) -> dict[str, Any]:
    """The format's four parallel lists, an entry a token."""
    return {
        "tokens": [t.text for t in written.tokens],
        "token_logprobs": [t.logprob for t in written.tokens],
        # Of equal texts the likelier one is told.
        "top_logprobs": [None if t.logprob is None else dict(reversed(t.top)) for t in written.tokens],
        "text_offset": [t.offset for t in written.tokens],
    }
