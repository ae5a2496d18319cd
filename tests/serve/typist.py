"""A Generator that types what it is told, one token of every request a step, and notes what was asked of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nonet.types import Completion, FinishReason, Request, UserError


class Typist:
    """script(request) gives the tokens to type; they repeat until the request ends. Log-probs tell positions apart:
    -(i + 1) / 8 as drawn, twice that raw. A step takes `step_s`; after `breaks_at` steps it raises.
    """

    def __init__(
        self,
        script: Callable[[Request], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        context: int = 4096,
        step_s: float = 0.0,
        breaks_at: int = 1 << 60,
    ):
        self._script, self._decode, self._breaks_at = script, decode, breaks_at
        self.version, self.context, self.step_s = 7, context, step_s
        self.steps, self.requests, self.aborted_at = 0, [], {}
        self._rows: dict[str, tuple[Request, list[int]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def submit(self, request: Request) -> None:
        if max(request.tokens) >= 10**6:
            raise UserError(f"request {request.id}: token id {max(request.tokens)} outside the vocabulary")
        self.requests.append(request)
        self._rows[request.id] = request, []

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.steps >= self._breaks_at:
            raise RuntimeError("the machine is on fire")
        time.sleep(self.step_s)
        ended = []
        for name, (request, written) in list(self._rows.items()):
            script = self._script(request)
            written.append(script[len(written) % len(script)])
            text = self._decode(written)
            if written[-1] in request.stop_ids or any(s in text for s in request.stop_texts):
                ended.append(self._end(name, "stop"))
            elif len(written) == request.max_tokens:
                ended.append(self._end(name, "length"))
        return ended

    def written(self, request_id: str, since: int = 0) -> Completion | None:
        found = self._rows.get(request_id)
        return None if found is None else _completion(*found, "running", self.version, since)

    def pause(self) -> list[Completion]:
        return [self._end(name, "paused") for name in list(self._rows)]

    def abort(self, request_id: str) -> Completion | None:
        if request_id not in self._rows:
            return None
        self.aborted_at[request_id] = self.steps
        return self._end(request_id, "aborted")

    def figures(self) -> dict[str, float]:
        return {"steps_total": self.steps, "pages_live": len(self._rows)}

    def _end(self, name: str, reason: FinishReason) -> Completion:
        return _completion(*self._rows.pop(name), reason, self.version, 0)


def _completion(request: Request, written: list[int], reason: FinishReason, version: int, since: int) -> Completion:
    at = range(since, len(written))
    drawn = tuple(-(i + 1) / 8 for i in at)
    k = request.top_logprobs
    top = tuple(tuple((t, -float(t + 1)) for t in range(k)) for _ in at) if k else ()
    return Completion(
        request.id, tuple(written[since:]), drawn, tuple(2 * p for p in drawn), reason, version, top, cached_tokens=2,
        drafted_tokens=3, accepted_tokens=1,
    )  # fmt: skip
