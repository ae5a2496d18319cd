"""The target's own answers: what a draft is trained on, since it must guess what the target would say.

Every assistant turn of a conversation is written anew by the target, in order, through its own chat template and at the
serving temperature; the file's own answers are dropped. Ids are kept as they were sampled and are never encoded again,
and what counts for the loss is known from who wrote it, not from marks in a template.

    answers.jsonl   first line {"settings": ...}; then one record a conversation, appended as it ends

Invariant: exactly one record for each conversation, whenever the process was killed: a torn last line is cut, and what
has no record is answered again from the start, with the same random numbers.
Refuses: to continue a file of other settings or another target, and to share a file with a running process.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from nonet.chat import Tokenizer
from nonet.chat.conversation import filled_message, filled_tool
from nonet.config import Config
from nonet.draft.data import Conversation
from nonet.draft.speech import Speech, answering
from nonet.progress import progress
from nonet.protocols import Generator
from nonet.types import Completion, Message, Request, Sampling, UserError

LONGEST_PERIOD = 64
LOOP_TOKENS = 48  # a tail of this length, and of three periods, that repeats is a loop


class AnswersConfig(Config):
    """temperature, top_p, top_k: as the draft will be served. max_tokens: of one turn. batch: written at a time."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int = Field(default=512, ge=1)
    seed: int = 0
    batch: int = Field(default=32, ge=1)


@dataclass(frozen=True)
class Row:
    """A sequence the target saw. policy: [begin, end) of what it wrote itself, ascending."""

    tokens: tuple[int, ...]
    policy: tuple[tuple[int, int], ...]

    @property
    def written(self) -> int:
        return sum(end - begin for begin, end in self.policy)


@dataclass(frozen=True)
class Answer:
    """A conversation's record. More than one row where the template shows earlier turns otherwise than they were
    written (without their reasoning, say): each turn then stands in a row of its own.

    turns: how many were written, of `asked`. stop: why no more: done; length (the last turn hit max_tokens); loop;
    context (no room); calls (the file's tool results do not answer the calls that the target made).
    """

    id: str
    domain: str
    heldout: bool
    rows: tuple[Row, ...]
    turns: int
    asked: int
    stop: str

    @property
    def looping(self) -> bool:
        return self.stop == "loop"

    @property
    def written(self) -> int:
        return sum(row.written for row in self.rows)

    @staticmethod
    def of(record: dict[str, Any]) -> Answer:
        rows = tuple(Row(tuple(r["tokens"]), tuple((a, b) for a, b in r["policy"])) for r in record["rows"])
        return Answer(**{**record, "rows": rows})


# ---------------------------------------------------------------------------------------- one conversation


@dataclass
class Talk:
    """A conversation being answered. said: its messages so far, the target's words in the places of the file's."""

    conversation: Conversation
    tokenizer: Tokenizer
    speech: Speech
    config: AnswersConfig
    context: int
    said: list[Message] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    turns: int = 0
    stop: str = ""
    _filled: str = ""  # text of the last row's prompt

    def ask(self) -> Request | None:
        """The next turn's request; None if the conversation has ended: then `stop` says why."""
        messages = self.conversation.messages
        if self.stop or len(self.said) >= len(messages):
            self.stop = self.stop or "done"
            return None
        while len(self.said) < len(messages) and messages[len(self.said)].role != "assistant":
            self.said.append(messages[len(self.said)])
        row, filled = self._prompt()
        room = min(self.config.max_tokens, self.context - len(row.tokens))
        if room < 1:
            self.stop = "context"
            return None
        self.rows[-1:] = [row] if row.policy or not self.rows else [self.rows[-1], row]
        self._filled = filled
        name = f"{self.conversation.id}/{self.turns}"
        how = Sampling(self.config.temperature, self.config.top_k, self.config.top_p, self.config.seed)
        return Request(name, row.tokens, room, self.tokenizer.stop_ids, how)

    def take(self, written: Completion) -> None:
        """Enter what the target wrote."""
        begin, tokens = len(self.rows[-1].tokens), self.rows[-1].tokens + written.tokens
        self.rows[-1] = Row(tokens, (*self.rows[-1].policy, (begin, len(tokens))))
        self.turns += 1
        ended = written.tokens[-1] in self.tokenizer.stop_ids
        text = self.tokenizer.decode(written.tokens[:-1] if ended else written.tokens)
        said = self.speech.read(text, self._filled)
        if loops(written.tokens):
            self.stop = "loop"
        elif self._results_follow():
            answered = answering(said, self.conversation.messages[len(self.said)])
            self.stop, said = ("calls", said) if answered is None else ("", answered)
        elif not ended and len(self.said) + 1 >= len(self.conversation.messages):
            self.stop = "length"
        self._filled += self.tokenizer.decode(written.tokens)
        self.said.append(said)

    def answer(self) -> Answer:
        c = self.conversation
        return Answer(c.id, c.domain, c.heldout, tuple(self.rows), self.turns, c.turns, self.stop)

    def _results_follow(self) -> bool:
        after = self.conversation.messages[len(self.said) + 1 :][:1]
        return bool(after) and after[0].role == "tool"

    def _prompt(self) -> tuple[Row, str]:
        """Everything said so far, as ids and as filled text. It goes on from the ids that were sampled if the template
        shows the conversation as it was written, and is a row without a turn if not.
        """
        tools = [filled_tool(t) for t in self.conversation.tools]
        filled = self.tokenizer.fill([filled_message(m) for m in self.said], True, tools)
        if not (self.rows and filled.startswith(self._filled)):
            return Row(tuple(self.tokenizer.encode_filled(filled)), ()), filled
        last, rest = self.rows[-1], self.tokenizer.encode_filled(filled[len(self._filled) :])
        return Row((*last.tokens, *rest), last.policy), filled


def loops(tokens: Sequence[int]) -> bool:
    """Whether the tail repeats itself: LOOP_TOKENS and three times a period of at most LONGEST_PERIOD tokens.

    >>> loops([1, 2, 3] * 40), loops(range(200))
    (True, False)
    """
    for period in range(1, LONGEST_PERIOD + 1):
        count = max(LOOP_TOKENS, 3 * period)
        if len(tokens) >= count + period and tokens[-count:] == tokens[-count - period : -period]:
            return True
    return False


# ---------------------------------------------------------------------------------------- all of them


def write_answers(
    engine: Generator,
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    file: Path,
    config: AnswersConfig,
    target: str,
) -> list[Answer]:
    """Answer every conversation that has no record in `file` yet; returns all records, in the conversations' order.

    target: the fingerprint of the model behind the engine.
    """
    wanted = list(conversations)
    with _opened(file, {"target": target, **config.model_dump(exclude={"batch"})}) as (known, records):
        missing = [c for c in wanted if c.id not in known]
        speech = Speech.of(tokenizer)
        talks = [Talk(c, tokenizer, speech, config, engine.context) for c in missing]
        before, tokens = len(wanted) - len(missing), 0
        with progress("answers", len(wanted), before) as bar:
            for done, answer in enumerate(_answered(engine, talks, 2 * config.batch), before + 1):
                records.write(_line(asdict(answer)))
                records.flush()
                os.fsync(records.fileno())
                known[answer.id] = answer
                tokens += answer.written
                bar(done, f"{tokens:,} tokens")
    return [known[c.id] for c in wanted]


def _answered(engine: Generator, talks: Iterable[Talk], together: int) -> Iterator[Answer]:
    """Answers as they end; at most `together` conversations are under way."""
    waiting, active = iter(talks), {}
    while True:
        while len(active) < together and (talk := next(waiting, None)) is not None:
            if (request := talk.ask()) is None:
                yield talk.answer()
                continue
            engine.submit(request)
            active[request.id] = talk
        if not active:
            return
        for completion in engine.step():
            talk = active.pop(completion.id)
            talk.take(completion)
            if (request := talk.ask()) is None:
                yield talk.answer()
            else:
                engine.submit(request)
                active[request.id] = talk


def read_answers(file: Path) -> tuple[dict[str, Any], list[Answer]]:
    """(settings, records) of a file of answers, a torn last line left out."""
    if not file.exists():
        raise UserError(f"answers {file}: no such file; write it with nonet draft answers")
    lines = file.read_bytes().split(b"\n")[:-1]
    settings = json.loads(lines[0]).get("settings") if lines else None
    if settings is None:
        raise UserError(f"answers {file}: does not begin with its settings; give a file that nonet draft answers wrote")
    return settings, [Answer.of(json.loads(line)) for line in lines[1:]]


@contextmanager
def _opened(file: Path, settings: dict[str, Any]) -> Iterator[tuple[dict[str, Answer], BinaryIO]]:
    """(records by id, the file open for appending), cut back to its last whole line, with these settings."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as records:
        try:
            fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system when a process dies
        except BlockingIOError as e:
            raise UserError(f"answers {file}: another process is writing it; wait for it or name another") from e
        records.truncate(file.read_bytes().rfind(b"\n") + 1)
        if file.stat().st_size == 0:
            records.write(_line({"settings": settings}))
            records.flush()
        found, answers = read_answers(file)
        if found != settings:
            changed = ", ".join(f"{k}: {found.get(k)!r} -> {v!r}" for k, v in settings.items() if found.get(k) != v)
            raise UserError(f"answers {file}: was written with other settings ({changed}); name another or delete it")
        yield {a.id: a for a in answers}, records


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


# ---------------------------------------------------------------------------------------- what came of it


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts, and shares of looping, cut and unfinished conversations."""
    n = max(1, len(answers))
    stops = {stop: sum(a.stop == stop for a in answers) / n for stop in ("done", "length", "loop", "context", "calls")}
    return {
        "conversations": len(answers),
        "turns": sum(a.turns for a in answers),
        "turns_asked": sum(a.asked for a in answers),
        "tokens": sum(a.written for a in answers),
        "stops": stops,
    }
