"""Text of tokens as it becomes certain: whole characters only, and nothing that may turn out to begin a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# How an incomplete character decodes. One alone may still become a character; those before it will not.
_INCOMPLETE = "\ufffd"
# Tokens kept as context: no character has more bytes, and decoders that treat the first token specially see no change.
_CONTEXT = 8


class TextStream:
    """Tokens in, text out. Joined, the pieces are `decode` of all tokens for every byte-level tokenizer.

    Only a window of recent tokens is decoded, so a long answer costs no more per token than a short one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode, self._window, self._given = decode, [], ""

    def feed(self, tokens: Sequence[int], last: bool = False) -> str:
        self._window: list[int] = [*self._window, *tokens]
        text = self._decode(self._window)
        certain = text if last else text.removesuffix(_INCOMPLETE)
        new = certain[len(self._given) :]
        self._given += new
        if certain == text and len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._given = self._decode(self._window)
        return new


class StopTexts:
    """Lets text through up to the first stop text; what may begin one waits. `found` once one has ended the text."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.found = tuple(stops), False
        self._pending = ""

    def feed(self, text: str, last: bool = False) -> str:
        if self.found:
            return ""
        self._pending += text
        at = [i for i in (self._pending.find(s) for s in self.stops) if i >= 0]
        self.found = bool(at)
        waits = max((unfinished(self._pending, s) for s in self.stops), default=0)
        ready = min(at) if at else len(self._pending) - (0 if last else waits)
        out, self._pending = self._pending[:ready], self._pending[ready:]
        return out


def unfinished(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`.

    >>> unfinished("a <tool", "<tool_call>")
    5
    """
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
