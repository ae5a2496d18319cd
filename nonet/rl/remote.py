"""A served model as a Generator: held-out tasks are played over HTTP, token ids in, token ids out.

Speaks /v1/completions with prompts of ids and `return_token_ids`, as `nonet serve` answers it. The weights behind an
address are somebody else's, so nothing is paused, parked or trained here: it is for measuring what clients get. A
request's `stop_ids` are not sent: an answer ends where the server's own tokenizer says that a turn ends.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict

from nonet.ops.rng import stream_key
from nonet.rl.endpoint import Endpoint
from nonet.types import Completion, Request, UserError


class Remote:
    """where: as `Endpoint` takes it. context: positions a request may fill. clients: requests at the same time.

    Raises UserError when the server cannot be reached or refuses; an accepted request ends in one Completion. drafted,
    accepted: tokens so far that a draft proposed there, and those of them that stood.
    """

    version = 0

    def __init__(self, where: str, context: int, clients: int = 16, endpoint: Endpoint | None = None):
        self.where, self.context = where, context
        self._endpoint = endpoint or Endpoint(where)
        self._threads = ThreadPoolExecutor(clients)
        self._running: dict[Future[Completion], str] = {}
        self.drafted = self.accepted = 0

    def submit(self, request: Request) -> None:
        if request.stop_texts or len(request.tokens) + request.max_tokens > self.context:
            raise UserError(
                f"request {request.id}: stop texts and more than {self.context} positions are not asked for"
            )
        self._running[self._threads.submit(self._complete, request)] = request.id

    def step(self) -> list[Completion]:
        """Waits for the next answers."""
        ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
        out = [f.result() for f in ended]
        for f in ended:
            del self._running[f]
        for c in out:
            self.drafted, self.accepted = self.drafted + c.drafted_tokens, self.accepted + c.accepted_tokens
        return out

    def pause(self) -> list[Completion]:
        """Nothing may be running: a served answer cannot be parked."""
        if self._running:
            raise UserError(f"{self.where}: {len(self._running)} answers are underway; a server cannot park")
        return []

    def abort(self, request_id: str) -> Completion | None:
        raise UserError(f"{self.where}: request {request_id} cannot be aborted from here")

    def written(self, request_id: str, since: int = 0) -> Completion | None:
        raise UserError(f"{self.where}: what request {request_id} wrote so far is not known here")

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._endpoint.close()

    def _complete(self, request: Request) -> Completion:
        sampling = asdict(request.sampling) | {
            "seed": stream_key(request.sampling.seed, request.stream)[0],
            "logit_bias": {str(token): bias for token, bias in request.sampling.logit_bias},
        }
        found = self._endpoint.ask("POST", "/completions", {
            "model": self._endpoint.model, "prompt": list(request.tokens), "max_tokens": request.max_tokens,
            "return_token_ids": True, "logprobs": 0, **sampling,
        })  # fmt: skip
        choice, usage = found["choices"][0], found["usage"]
        details = usage["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        return Completion(
            request.id,
            tuple(choice["token_ids"]),
            tuple(choice["token_logprobs"]),  # of the distribution they were drawn from
            tuple(choice["logprobs"]["token_logprobs"]),
            choice["finish_reason"],
            self.version,
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            drafted_tokens=accepted + details["rejected_prediction_tokens"],
            accepted_tokens=accepted,
        )
