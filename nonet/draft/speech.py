"""What a target wrote in one turn, read back as a Message for the template that renders the next turn's prompt.

Owns: where reasoning ends and text begins, found by filling the template with a probe (calls: chat.CallSyntax). The
Message only feeds templates; what is trained on are the ids themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nonet.chat import CallReader, CallSyntax, Tokenizer
from nonet.chat.conversation import filled_message
from nonet.types import Message, Part, Reasoning, Text, ToolCall, UserError

_THOUGHT, _SAID = "probe thought", "probe words"


@dataclass(frozen=True, slots=True)
class Speech:
    """open and close: the marks the template sets around reasoning; both empty if it shows none."""

    open: str
    close: str
    calls: CallSyntax | None

    @staticmethod
    def of(tokenizer: Tokenizer) -> Speech:
        turn = [Message.user("q"), Message.assistant(_SAID, _THOUGHT)]
        try:
            text = tokenizer.fill([filled_message(m) for m in turn], False)
        except UserError:
            text = ""
        before, thought, rest = text.partition(_THOUGHT)
        between, said, _ = rest.partition(_SAID)
        shown = bool(thought and said and between.strip())
        open, close = (_last_word(before, tokenizer), between.strip()) if shown else ("", "")
        return Speech(open, close, CallSyntax.of(tokenizer))

    def read(self, text: str, prompt: str = "") -> Message:
        """The assistant's message of a turn's text, without the template's blanks around reasoning. prompt: the filled
        text before it, which may have opened the reasoning already.
        """
        parts: tuple[Part, ...] = ()
        opened = bool(self.open) and prompt.rstrip().endswith(self.open)
        if self.close and (opened or text.lstrip().startswith(self.open)):
            thought, _, text = text.partition(self.close)
            thought = thought.strip().removeprefix(self.open).strip()
            parts, text = ((Reasoning(thought),) if thought else ()), text.lstrip("\n")
        if self.calls is None:
            return Message("assistant", (*parts, Text(text)) if text else parts)
        read = CallReader(self.calls).feed(text, last=True)
        said = "".join(p for p in read if isinstance(p, str))
        made = tuple(p for p in read if isinstance(p, ToolCall))
        return Message("assistant", (*parts, *((Text(said),) if said else ()), *made))


def answering(said: Message, written: Message) -> Message | None:
    """`said` with the ids of the calls that the file's turn made, if it made the same calls in the same order; then the
    file's results answer it too. None if not.
    """
    ours, theirs = said.calls, written.calls
    if [c.name for c in ours] != [c.name for c in theirs]:
        return None
    ids = iter(c.id for c in theirs)
    return Message(said.role, tuple(replace(p, id=next(ids)) if isinstance(p, ToolCall) else p for p in said.parts))


def _last_word(text: str, tokenizer: Tokenizer) -> str:
    """`<think>` of "<|assistant|><think>\\n": words end at blanks and at control tokens."""
    control = "|".join(map(re.escape, tokenizer.special)) or r"(?!)"
    return next((w for w in reversed(re.split(rf"({control})|\s+", text)) if w), "")
