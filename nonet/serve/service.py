"""From an Ask to answers: limits are kept, prompts rendered, requests run, and freed whatever happens."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

from nonet.chat import CallReader, CallSyntax, Prompt, Tokenizer, prompt
from nonet.protocols import Generator
from nonet.serve.answering import Answering
from nonet.serve.choice import Choice
from nonet.serve.limits import Limits
from nonet.serve.metrics import Metrics
from nonet.serve.worker import Worker
from nonet.types import Completion, Request
from nonet.wire.ask import Ask, Head, Refusal, Usage, Written

RETRY_AFTER_S = 1


@runtime_checkable
class Measured(Protocol):
    """A generator that counts; names ending in _total only grow."""

    def figures(self) -> dict[str, float]: ...


@runtime_checkable
class Scoring(Protocol):
    """A generator that can tell the log-probs of given tokens (see Engine.score)."""

    def score(self, tokens: tuple[int, ...], top_logprobs: int = 0) -> Completion: ...


class Service:
    """One generator behind many requests. Made inside a running event loop, and closed there.

    on_failure is called once if the generator breaks; from then on every request is refused.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        name: str,
        limits: Limits,
        on_failure: Callable[[BaseException], None],
    ):
        self.name, self.limits, self.created = name, limits, int(time.time())
        self.metrics, self.draining, self.failed = Metrics(), False, False
        self._generator, self._on_failure = generator, on_failure
        self._worker = Worker(generator, self._fail)
        # Encoding switches a flag of its tokenizer, so it has a thread and a tokenizer to itself.
        self._encoder, self._decoder = tokenizer, Tokenizer(tokenizer.directory)
        self._text_thread = ThreadPoolExecutor(1, "text")
        self._syntax = CallSyntax.of(tokenizer) if tokenizer.template is not None else None
        self._answerings: set[Answering] = set()
        self._rendering = 0  # answers whose prompts are not tokens yet

    # -------------------------------------------------------------------- state

    @property
    def ready(self) -> bool:
        return not (self.draining or self.failed)

    @property
    def open(self) -> int:
        return len(self._answerings)

    @property
    def queued(self) -> int:
        """Answers that wait for their first token."""
        return self._rendering + sum(inbox.started_at is None for a in self._answerings for inbox in a.inboxes)

    async def metrics_text(self) -> bytes:
        generator = self._generator
        figures = await self._worker.call(generator.figures) if isinstance(generator, Measured) else {}
        return self.metrics.text(figures, self.open, self.queued)

    async def drain(self) -> None:
        """Take no more requests; return when the last answer is complete, or was cut after `limits.drain_s`."""
        self.draining = True
        until = time.monotonic() + self.limits.drain_s
        while (self._answerings or self._rendering) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._worker.cut(_going_down())

    def close(self) -> None:
        self._worker.close()
        self._text_thread.shutdown()

    def _fail(self, error: BaseException) -> None:
        self.failed = True
        self._on_failure(error)

    # ------------------------------------------------------------------ requests

    async def begin(self, ask: Ask, kind: str, began: float) -> Answering:
        """Whatever can refuse a request does so here, before a word of the answer. began: time.monotonic() at arrival.

        The answering must be given to `end`.
        """
        opening = self._opening(ask)
        asked = max(1, len(ask.prompts)) * ask.count
        self._admit(ask, asked)
        self._rendering += asked
        try:
            loop = asyncio.get_running_loop()
            prompts = await loop.run_in_executor(self._text_thread, self._prompts, ask, opening)
        finally:
            self._rendering -= asked
        head = Head(f"{kind}-{uuid.uuid4().hex}", self.name, int(time.time()), "", tuple(p.tokens for p in prompts))
        requests = self._requests(ask, head.id, prompts)
        choices = [self._choice(ask, opening, p) for p in prompts for _ in range(ask.count)]
        deltas = ask.stream or ask.one_call
        answering = Answering(self._worker, head, requests, choices, deltas, began + self.limits.request_s)
        self._answerings.add(answering)
        try:
            answering.head = replace(head, fingerprint=f"nonet-v{await answering.start()}")
        except BaseException:
            self._answerings.discard(answering)
            answering.free()
            raise
        return answering

    async def score(self, ask: Ask, kind: str, route: str) -> tuple[Head, list[Written], Usage]:
        """The prompts of an Ask that is `scored`, one after another between steps of the generator."""
        generator, waiting = self._generator, len(ask.prompts)
        if not isinstance(generator, Scoring):
            raise Refusal("echo: this server cannot score a prompt; leave out logprobs", param="echo")
        self._admit(ask, waiting)
        self._rendering += waiting
        try:
            loop, top = asyncio.get_running_loop(), ask.top_logprobs or 0
            prompts = await loop.run_in_executor(self._text_thread, self._prompts, ask, "")
            told = [await self._worker.call(partial(generator.score, p.tokens, top)) for p in prompts]
        finally:
            self._rendering -= waiting
        ids = tuple(p.tokens for p in prompts)
        version = f"nonet-v{told[0].policy_version}"
        head, usage = Head(f"{kind}-{uuid.uuid4().hex}", self.name, int(time.time()), version, ids), _read_only(ids)
        self.metrics.scored(route, usage)
        return head, [self._spoken(t) for t in told], usage

    def _spoken(self, told: Completion) -> Written:
        """Given tokens as text, stop ids among them; nothing precedes the first."""
        written = Choice(self._decoder.decode, ()).feed(told)
        first, *rest = written.tokens
        return replace(written, tokens=(replace(first, logprob=None), *rest))

    def end(self, answering: Answering, route: str, began: float) -> None:
        self._answerings.discard(answering)
        answering.free()
        self.metrics.answered(answering, route, began)

    def _admit(self, ask: Ask, asked: int) -> None:
        if self.draining or self.failed:
            raise _going_down()
        if ask.model not in (None, self.name):
            told = f"model = {ask.model!r:.80}: not served here; ask for {self.name!r}"
            raise Refusal(told, 404, code="model_not_found", param="model")
        if asked > self.limits.choices:
            most = self.limits.choices
            raise Refusal(f"n = {ask.count}: {asked} answers in one request; at most {most} are allowed", param="n")
        if self.queued + asked > self.limits.queued:
            told = f"{self.queued} answers wait and {self.limits.queued} may; try again in {RETRY_AFTER_S} s"
            raise Refusal(told, 429, "rate_limit_error", "queue_full", retry_after_s=RETRY_AFTER_S)

    def _opening(self, ask: Ask) -> str:
        """Filled text that the assistant's turn must begin with."""
        if not ask.tools:
            return ""
        if self._syntax is None:
            raise Refusal(
                "tools: the model's chat template shows no tools, or writes calls in a way this server cannot read; "
                "describe them in the system message instead",
                param="tools",
            )
        return self._syntax.opening(self._decoder, ask.must_call_tool) if ask.must_call else ""

    def _prompts(self, ask: Ask, opening: str) -> list[Prompt]:
        """In the text thread."""
        if ask.messages:
            return [prompt(self._encoder, ask.messages, ask.tools, opening)]
        return [Prompt(tuple(self._encoder.encode(p)) if isinstance(p, str) else p) for p in ask.prompts]

    def _requests(self, ask: Ask, answer_id: str, prompts: Sequence[Prompt]) -> list[Request]:
        """`count` for the first prompt, then for the second, ... The k-th answers of equal prompts are equal."""
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        return [
            Request(
                id=f"{answer_id}/{p}/{k}",
                tokens=made.tokens,
                max_tokens=self._room(ask, len(made.tokens)),
                stop_ids=self._decoder.stop_ids,
                sampling=replace(ask.sampling, seed=seed),
                stream=str(k),
                stop_texts=ask.stop_texts,
                boundaries=made.boundaries,
                top_logprobs=ask.top_logprobs or 0,
            )
            for p, made in enumerate(prompts)
            for k in range(ask.count)
        ]

    def _room(self, ask: Ask, tokens: int) -> int:
        """How many tokens an answer may have."""
        param, context = "messages" if ask.messages else "prompt", self._generator.context
        if not tokens:
            raise Refusal(f"{param}: no tokens; an answer needs at least one to follow", param=param)
        wanted = ask.max_tokens or max(1, context - tokens)
        if tokens + wanted > context:
            raise Refusal(
                f"{param}: {tokens} tokens + max_tokens {wanted} = {tokens + wanted} exceeds the context of {context}; "
                "shorten one of them",
                code="context_length_exceeded",
                param=param,
            )
        return wanted

    def _choice(self, ask: Ask, opening: str, made: Prompt) -> Choice:
        reader = CallReader(self._syntax) if ask.tools and self._syntax else None
        echo = self._decoder.decode(made.tokens) if ask.echo else ""
        ends = self._decoder.stop_ids
        return Choice(self._decoder.decode, ends, ask.stop_texts, reader, opening, ask.one_call, echo)


def _read_only(prompts: Sequence[tuple[int, ...]]) -> Usage:
    return Usage(sum(map(len, prompts)), 0, 0)


def _going_down() -> Refusal:
    told = "the server is shutting down; ask another one, or this one again once it is back"
    return Refusal(told, 503, "server_error", "shutting_down", retry_after_s=RETRY_AFTER_S)
