"""One request while it is answered: news of all its answers, in the order they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from nonet.serve.choice import Choice
from nonet.serve.worker import Inbox, News, Worker
from nonet.types import Completion, Request
from nonet.wire.ask import Head, Refusal, Usage, Written


class Answering:
    """Requests that run for one HTTP request, and the choices that read what they write; both in the same order.

    deltas: news after every step, not only at the end. until: time.monotonic() at which patience ends. outcome: how it
    went, "hung_up" until something else is known. `free` must be called, whatever happens.
    """

    def __init__(
        self,
        worker: Worker,
        head: Head,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        deltas: bool,
        until: float,
    ):
        self.head, self.requests, self.choices = head, requests, choices
        self._worker, self._until = worker, until
        self._queue: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self.inboxes = [Inbox(self._queue, i, deltas) for i in range(len(requests))]
        self.ended_at: list[float | None] = [None] * len(requests)
        self._last: list[Completion | None] = [None] * len(requests)
        self.outcome = "hung_up"

    async def start(self) -> int:
        """Hand the requests over; UserError where they are refused. Returns the version of the weights."""
        return await self._worker.submit(self.requests, self.inboxes)

    async def news(self) -> AsyncIterator[tuple[int, Written]]:
        """(index, what that answer gained) until all are complete; Refusal where time is up or the server goes down."""
        while None in self.ended_at:
            index, news = await self._next()
            if isinstance(news, Refusal):
                self.outcome = news.code or "failed"
                raise news
            if self.ended_at[index] is not None:
                continue
            written = self.choices[index].feed(news)
            if written.finish is not None:
                self.ended_at[index] = time.monotonic()
                self._last[index] = news
                if news.finish_reason == "running":
                    self._worker.abort([self.requests[index].id])
            if written != Written():
                yield index, written
        self.outcome = "answered"

    async def whole(self) -> list[Written]:
        answers = [Written() for _ in self.requests]
        async for index, written in self.news():
            answers[index] += written
        return answers

    def free(self) -> None:
        """Let the generator forget what has not ended."""
        self._worker.abort([r.id for r, ended in zip(self.requests, self.ended_at, strict=True) if ended is None])

    def usage(self) -> Usage:
        """Each prompt counts once, however many answers it got."""
        each = len(self.requests) // len(self.head.prompt_ids)
        prompt = sum(map(len, self.head.prompt_ids))
        ended = [c for c in self._last if c is not None]
        cached = sum(c.cached_tokens for c in self._last[::each] if c is not None)
        drafted, accepted = sum(c.drafted_tokens for c in ended), sum(c.accepted_tokens for c in ended)
        return Usage(prompt, sum(c.tokens for c in self.choices), cached, drafted, accepted)

    async def _next(self) -> tuple[int, News]:
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                return await self._queue.get()
        except TimeoutError:
            self.outcome = "timed_out"
            raise Refusal(
                "the answer took longer than a request may; ask for fewer tokens, or start the server with a larger "
                "--max-seconds", 504, "server_error", "timeout",
            ) from None  # fmt: skip
