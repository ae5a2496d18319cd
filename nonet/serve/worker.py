"""One thread owns the generator; the asyncio side asks it to act between steps and is told what was written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nonet.protocols import Generator
from nonet.types import Completion, Request
from nonet.wire.ask import Refusal

News = Completion | Refusal


@dataclass(eq=False)
class Inbox:
    """Where one answer's news go, as (index, news). Every Completion holds what the one before it did not.

    deltas: tell after every step, not only at the end. started_at: time.monotonic() of its first token.
    """

    queue: asyncio.Queue[tuple[int, News]]
    index: int
    deltas: bool
    seen: int = 0
    started_at: float | None = None


@dataclass(frozen=True)
class _Order:
    """done: who waits for the result or the exception; None: nobody, and an exception means that the engine broke."""

    act: Callable[[], Any]
    done: asyncio.Future[Any] | None = None


class Worker:
    """Steps the generator while it is busy, sleeps while it is not.

    Whatever goes wrong inside the generator ends every answer with an error and is handed to `on_failure`: a generator
    in an unknown state is not asked again.
    """

    def __init__(self, generator: Generator, on_failure: Callable[[BaseException], None]):
        self._generator, self._on_failure = generator, on_failure
        self._loop = asyncio.get_running_loop()
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # --------------------------------------------------- called from the asyncio side

    async def call(self, act: Callable[[], Any]) -> Any:
        """Run `act` in the engine's thread, between two steps."""
        done = self._loop.create_future()
        self._orders.put(_Order(act, done))
        return await done

    async def submit(self, requests: Sequence[Request], inboxes: Sequence[Inbox]) -> int:
        """Hand over requests, all or none; UserError where the generator refuses one. Returns the weights' version."""
        return await self.call(lambda: self._submit(requests, inboxes))

    def abort(self, ids: Sequence[str]) -> None:
        """Free requests before the next step. Those that have ended, or were never there, are passed over."""
        self._orders.put(_Order(lambda: self._abort(ids)))

    def cut(self, reason: Refusal) -> None:
        """Free every request; each answer ends with `reason`."""
        self._orders.put(_Order(lambda: self._cut(reason)))

    def close(self) -> None:
        """Stop after the step that is running."""
        self._orders.put(None)
        self._thread.join()

    # ------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as e:
            self._die(e)

    def _obey(self) -> bool:
        """Carry out what was asked meanwhile, and wait for more while there is nothing to generate. False: close."""
        while not self._orders.empty() or not self._generator.busy:
            order = self._orders.get()
            if order is None:
                return False
            try:
                self._settle(order, order.act())
            except Exception as e:
                if order.done is None:
                    raise
                self._settle(order, e)
        return True

    def _step(self) -> None:
        ended = self._generator.step()
        news: list[tuple[Inbox, News]] = []
        for completion in ended:
            inbox = self._inboxes.pop(completion.id, None)
            if inbox is not None:
                news.append((inbox, _since(completion, inbox.seen)))
        for request_id, inbox in self._inboxes.items():
            if inbox.deltas or inbox.started_at is None:
                self._look(request_id, inbox, news)
        for inbox, _ in news:
            inbox.started_at = inbox.started_at or time.monotonic()
        self._tell(news)

    def _look(self, request_id: str, inbox: Inbox, news: list[tuple[Inbox, News]]) -> None:
        written = self._generator.written(request_id, inbox.seen)
        if written is None or not written.tokens:
            return
        if inbox.deltas:
            inbox.seen += len(written.tokens)
            news.append((inbox, written))
        else:
            inbox.started_at = time.monotonic()

    def _submit(self, requests: Sequence[Request], inboxes: Sequence[Inbox]) -> int:
        taken: list[str] = []
        try:
            for request in requests:
                self._generator.submit(request)
                taken.append(request.id)
        except Exception:
            self._abort(taken)
            raise
        self._inboxes |= dict(zip(taken, inboxes, strict=True))
        return self._generator.version

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._inboxes.pop(request_id, None)
            self._generator.abort(request_id)

    def _cut(self, reason: Refusal) -> None:
        for request_id in self._inboxes:
            self._generator.abort(request_id)
        self._tell([(inbox, reason) for inbox in self._inboxes.values()])
        self._inboxes.clear()

    def _die(self, error: BaseException) -> None:
        reason = Refusal("the engine has failed; the server is going down", 500, "server_error", "engine_failed")
        self._loop.call_soon_threadsafe(self._on_failure, error)
        self._tell([(inbox, reason) for inbox in self._inboxes.values()])
        self._inboxes.clear()
        while (order := self._orders.get()) is not None:
            self._settle(order, reason)

    def _tell(self, news: Sequence[tuple[Inbox, News]]) -> None:
        if news:
            self._loop.call_soon_threadsafe(_deliver, news)

    def _settle(self, order: _Order, result: Any) -> None:
        if order.done is not None:
            self._loop.call_soon_threadsafe(_resolve, order.done, result)


def _since(completion: Completion, seen: int) -> Completion:
    names = ("tokens", "logprobs", "raw_logprobs", "top_logprobs")
    return replace(completion, **{name: getattr(completion, name)[seen:] for name in names})


def _deliver(news: Sequence[tuple[Inbox, News]]) -> None:
    for inbox, told in news:
        inbox.queue.put_nowait((inbox.index, told))


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():  # its asker hung up meanwhile
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
