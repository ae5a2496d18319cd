"""One answer as it grows: tokens in, text and calls that are certain out."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from nonet.chat import CallReader, StopTexts, TextStream
from nonet.types import Completion, ToolCall
from nonet.wire.ask import Token, Written


class Choice:
    """Tokens are told together with the text they complete, so that joined pieces align however they were cut.

    stop_ids end the answer and are no text. echo: text the answer begins with. opening: words of a call that the prompt
    already put into the assistant's mouth. `tokens` counts what was taken, a stop text's tokens included.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_ids: Sequence[int],
        stop_texts: Sequence[str] = (),
        reader: CallReader | None = None,
        opening: str = "",
        one_call: bool = False,
        echo: str = "",
    ):
        self._decode, self._stop_ids, self._one_call = decode, frozenset(stop_ids), one_call
        self._stream, self._stops, self._reader = TextStream(decode), StopTexts(stop_texts), reader
        self._chars = len(echo)
        self._waiting: list[Token] = []
        self._text, self._calls = echo, []
        self.finish: str | None = None
        self.tokens, self.called = 0, False
        if reader is not None:
            self._hear(opening)

    def feed(self, news: Completion) -> Written:
        """What became certain through these further tokens; they may be none."""
        for i, token in enumerate(news.tokens):
            if self.finish is not None:
                break
            self._take(news, i, token)
        if self.finish is None and news.finish_reason != "running":
            self._hear(self._stops.feed(self._stream.feed([], last=True), last=True))
            self.finish = "stop" if self._stops.found else news.finish_reason
        if self.finish is not None:
            self._hear("", last=True)
            self.finish = "tool_calls" if self.called and self.finish == "stop" else self.finish
        elif not (self._text or self._calls):
            return Written()
        out = Written(self._text, tuple(self._calls), tuple(self._waiting), self.finish)
        self._text, self._calls, self._waiting = "", [], []
        return out

    def _take(self, news: Completion, i: int, token: int) -> None:
        top = tuple((self._decode([t]), p) for t, p in news.top_logprobs[i]) if news.top_logprobs else ()
        shown = self._decode([token])
        self._waiting.append(Token(token, shown, self._chars, news.raw_logprobs[i], news.logprobs[i], top))
        self.tokens += 1
        if token in self._stop_ids:
            return
        text = self._stream.feed([token])
        self._chars += len(text)
        self._hear(self._stops.feed(text))
        if self._stops.found:
            self.finish = "stop"

    def _hear(self, text: str, last: bool = False) -> None:
        parts = [text] if self._reader is None else self._reader.feed(text, last)
        for part in parts:
            if self._one_call and self.called:
                break
            if isinstance(part, ToolCall):
                self._calls.append(replace(part, id=f"call_{uuid.uuid4().hex[:24]}"))
                self.called = True
            else:
                self._text += part
        if self._one_call and self.called:
            self.finish = self.finish or "stop"
