"""Answers written by a process of its own, so that a test can kill it."""

from __future__ import annotations

import sys
from pathlib import Path

from nonet.chat import Tokenizer
from nonet.draft.answers import AnswersConfig, write_answers
from nonet.draft.data import Conversation, conversation
from nonet.engine import Engine
from nonet.model import hf
from nonet.types import Message


def chats(count: int, turns: int = 2) -> list[Conversation]:
    out = []
    for i in range(count):
        words = [m for t in range(turns) for m in (Message.user(f"add {i} {t}"), Message.assistant(f"OLD ANSWER {i}"))]
        out.append(conversation(words))
    return out


if __name__ == "__main__":
    directory, file = map(Path, sys.argv[1:])
    engine = Engine(hf.load(directory), max_batch=2)
    write_answers(engine, Tokenizer(directory), chats(40), file, AnswersConfig(max_tokens=16, batch=2), "t")
