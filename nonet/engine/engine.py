"""The engine: Requests in, Completions out, each as if it were alone.

A step is three statements: the scheduler picks rows and gives them pages, the model is fed, results are committed. What
one row computed, others may start from (prefix.py); memory of other weights is never found, because the salt of its
keys names them.

`deterministic=True` feeds every token alone, one row at a time. A result then depends, to the last bit, on nothing but
weights, tokens and stream: the slow twin of the batched path (laws 3, 4, 8, 9, 17, 18). `prefix_cache=False` is the
slow twin of everything that is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from nonet import native as kernels
from nonet.engine.accounts import Accounts
from nonet.engine.drafter import Drafter
from nonet.engine.feed import Decoding, padded, sampling_of, state_of
from nonet.engine.forward import Forward
from nonet.engine.ledger import Ledger
from nonet.engine.prefix import PrefixCache
from nonet.engine.row import Report, Row, check_request
from nonet.engine.sampler import SamplingRows, sample, top
from nonet.engine.scheduler import Batch, Scheduler
from nonet.engine.scoring import Passage, likeliest, score
from nonet.engine.snapshots import Node
from nonet.engine.speculation import Drafted, Speculation
from nonet.engine.weights import copy_weights
from nonet.model import Model
from nonet.model.native_decode import NativeDecoder
from nonet.model.state import PAGE, Memory
from nonet.types import Completion, FinishReason, Request, UserError


@dataclass(frozen=True)
class _Held:
    """Where a held or paused request stopped: its known tokens but the last are remembered, up to and after `node`."""

    tokens: tuple[int, ...]
    node: Node


class Engine:
    """A `protocols.Generator` over a `Model`, which it shares with its owner; only `load` with weights changes it."""

    def __init__(
        self,
        model: Model,
        max_batch: int = 256,
        deterministic: bool = False,
        version: int = 0,
        native: bool = True,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        prefix_cache: bool = True,
        pages: int | None = None,
        chunk: int = 8192,
        cache_bytes: int = 256 << 20,
        snapshots: int = 256,
        snapshot_dtype: torch.dtype | None = None,
        weights: str = "float32",
        drafter: Drafter | None = None,
    ):
        """native: decode through C where the machine and the model allow it (float32 on a CPU with a compiler).
        weights: the format that reads (model/native_weights.py); prompts are read in float32.
        decode: token ids to text, for stop_texts. pages: limit of the memory, of 16 positions each (None: as needed).
        chunk: tokens of prompts computed a step. cache_bytes: pages kept that no row uses. snapshots: KDA states kept,
        in snapshot_dtype (None: the model's; bfloat16 is half the size and no longer exact). drafter: proposes tokens,
        of which those stand that change nothing about what is written (speculation.py).
        """
        weight = model.embed_tokens.weight
        self._native = NativeDecoder.of(model, weights) if native and not deterministic else None
        self.model, self.version, self.decode, self.drafter = model, version, decode, drafter
        self.context, self.device = model.config.max_position, weight.device
        hybrid, drafted = "kda" in model.config.layer_mixers, drafter.steps if drafter else 0
        pools = dict(drafter.pools) if drafter else {}
        memory = Memory(model.config, 0, 0, weight.dtype, weight.device, pools)
        # Beside its own slot, a row needs one for each drafted token while these are verified.
        self.ledger = Ledger(memory, pages, max_batch * (1 + drafted if hybrid else 1))
        self.cache = None
        if prefix_cache:
            shelf = Memory(model.config, 0, 0, snapshot_dtype or weight.dtype, weight.device)
            page_bytes = PAGE * max(1, model.cost.bytes_per_token(weight.element_size()))
            page_bytes += sum(map(prod, pools.values())) * weight.element_size()
            self.cache = PrefixCache(self.ledger, shelf, snapshots, cache_bytes // page_bytes)
        self.forward = Forward(model, self._native, deterministic, drafter.taps if drafter else ())
        self.speculation = None
        if drafter is not None:
            self.speculation = Speculation(drafter, self.forward, self.ledger, hybrid, self.device)
        settle = self.speculation.settle if self.speculation else None
        self.scheduler = Scheduler(self.ledger, self.cache, max_batch, chunk, hybrid, drafted, settle)
        self._in_flight: dict[str, Row] = {}  # in order of arrival
        self._paused: list[Request] = []
        self._held: dict[str, _Held] = {}
        self._decoding: Decoding | None = None  # the last decode batch
        self.accounts = Accounts(drafter is not None)
        level = kernels.level() if kernels.library() is not None else "torch"
        shape = sha256(model.config.model_dump_json().encode()).hexdigest()[:16]
        self._computing = f"{shape}/{weight.dtype}/{weight.device.type}/{level}"

    # ------------------------------------------------------------ the door

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def salt(self) -> str:
        """What the cache's keys are bound to: model, dtype, device, kernels, weight version."""
        return f"{self._computing}/{self.version}"

    def submit(self, request: Request) -> None:
        """UserError, naming the limit, for what can never be served; then nothing has changed."""
        if request.id in self._in_flight:
            raise UserError(
                f"request {request.id}: a request of this id is in flight; ids must be unique until they end"
            )
        check_request(request, self.model.config, self.ledger.pages.limit, self.decode is not None)
        held = self._held.pop(request.id, None)
        extends = held is not None and request.tokens[: len(held.tokens)] == held.tokens
        row = Row.of(request, held.node.salt if held is not None and extends else self.salt)
        self._paused = [r for r in self._paused if r.id != request.id]
        self._in_flight[request.id] = row
        self.scheduler.waiting.append(row)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Compute chunks of prompts, and a token or a few drafted ones for rows past theirs. Returns what ended."""
        batches = self.scheduler.schedule()
        computed = [self._compute(batch) for batch in batches]
        return self._commit(batches, computed)

    def written(self, request_id: str, since: int = 0) -> Completion | None:
        """See protocols.Generator."""
        row = self._in_flight.get(request_id)
        return None if row is None else row.completion("running", self.version, since)

    def run(self) -> list[Completion]:
        """Step until nothing is left."""
        done: list[Completion] = []
        while self.busy:
            done += self.step()
        return done

    @torch.inference_mode()
    def pause(self) -> list[Completion]:
        """Stop everything in flight; each request comes back as an honest partial Completion, in order of arrival.
        `resume` continues them; so does submitting them again (`Request.continued`).
        """
        rows = list(self._in_flight.values())
        partial = [row.completion("paused", self.version) for row in rows]
        self._paused = [row.request.continued(c) for row, c in zip(rows, partial, strict=True)]
        for row in rows:
            self._leave(row, held=True)
        self._check_if_idle()
        return partial

    def resume(self) -> None:
        """Submit again what the last `pause` stopped and nobody has submitted since."""
        for request in list(self._paused):
            self.submit(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> Completion | None:
        """End a request wherever it is; its memory is free at once. What was held for its id is forgotten too."""
        self._held.pop(request_id, None)
        self._paused = [r for r in self._paused if r.id != request_id]
        row = self._in_flight.get(request_id)
        if row is None:
            return None
        ended = row.completion("aborted", self.version)
        self._leave(row, kept=False)
        self._check_if_idle()
        return ended

    @torch.inference_mode()
    def load(
        self,
        version: int,
        weights: Mapping[str, Tensor] | None = None,
        on_resume: Literal["reprefill", "reuse"] = "reprefill",
    ) -> None:
        """The shared model's weights are now `version`; `weights`, if given, are copied into it first. Nothing may be
        in flight. What the old weights wrote is forgotten, but with "reuse" held and paused requests go on from it:
        `figures` then says how far their next log-probs are from freshly computed ones.
        """
        if self.busy:
            raise RuntimeError("load() while requests are in flight; pause() first")
        if weights is not None:
            copy_weights(self.model, weights)
        self.version = version
        if on_resume == "reprefill":
            self._held.clear()
        if self.cache is not None:
            self.cache.forget({held.node for held in self._held.values()})
        self.accounts.renew()
        if self._native is not None:
            self._native.refresh()
        if self.drafter is not None:
            self.drafter.refresh()

    def score(self, tokens: tuple[int, ...], top_logprobs: int = 0) -> Completion:
        """Given tokens as if they had been written, without a word more: one forward, of which nothing is remembered.
        Nothing precedes the first, whose log-prob is told as 0. UserError for what the model cannot read.
        """
        passage = Passage(tokens, 1)
        logprobs = (0.0, *score(self.model, [passage], 1.0, self.forward.deterministic)[0])
        tops = ((), *map(tuple, likeliest(self.model, passage, top_logprobs))) if top_logprobs else ()
        return Completion("", tokens, logprobs, logprobs, "length", self.version, tops)

    def report(self, request_id: str) -> Report | None:
        """How much of an ended request was remembered; once, then it is forgotten."""
        return self.accounts.report(request_id)

    @property
    def decode_steps(self) -> int:
        return self.accounts.totals["decode_steps_total"]

    def figures(self) -> dict[str, float]:
        """Counters, named _total, and gauges."""
        rows, cache = self.scheduler.rows, self.cache
        live = {page for row in rows for page in row.pages}
        cached = set() if cache is None else set(cache.owned()[0])
        return {
            **self.accounts.figures(),
            "preemptions_total": float(self.scheduler.preemptions),
            "waiting": float(len(self._in_flight) - len(rows)),
            "running": float(len(rows)),
            "pages_free": float(len(self.ledger.pages.free)),
            "pages_live": float(len(live)),
            "pages_cached": float(len(cached - live)),
            "snapshots": 0.0 if cache is None else float(len(cache.snapshots.kept)),
            "memory_bytes": float(self.ledger.memory.bytes),
        }

    # ------------------------------------------------------- one step, thrice

    def _compute(self, batch: Batch) -> Tensor | list[Drafted]:
        """Logits after each row's last fed token, or after each of several."""
        if batch.decode:
            return self.speculation.feed(batch) if self.speculation else self._decode(batch.rows)
        rows, counts = batch.rows, batch.counts
        state = state_of(rows, self.ledger.memory, self.device)
        fed = [row.tokens[row.filled : row.filled + n] for row, n in zip(rows, counts, strict=True)]
        logits_BW, features_BTF = self.forward.prompt(padded(fed, self.device), state, counts)
        if self.speculation:
            self.speculation.learn(rows, counts, features_BTF)
        return logits_BW

    def _decode(self, rows: list[Row]) -> Tensor:
        known, preemptions = self._decoding, self.scheduler.preemptions
        if known is None or not known.covers(rows, preemptions):
            known = self._decoding = Decoding(rows, preemptions, self.ledger.memory, self.device)
        known.turn_pages()
        return self.forward.decode(known.last_B1, known.state)

    def _commit(self, batches: list[Batch], computed: list[Tensor | list[Drafted]]) -> list[Completion]:
        ended: dict[str, FinishReason] = {}
        for batch, found in zip(batches, computed, strict=True):
            self.accounts.totals["decode_steps_total"] += batch.decode
            if isinstance(found, list):
                for drafted in found:
                    self._write_drafted(drafted, ended)
                continue
            for row, count in zip(batch.rows, batch.counts, strict=True):
                self.scheduler.advance(row, count)
            known = self._decoding
            if batch.decode and known is not None and not any(r.followers for r in batch.rows):
                known.advance(self._write(batch.rows, found, known.sampling, ended))
                continue
            done = [(row, i) for i, row in enumerate(batch.rows) if not row.pending]
            done += [(twin, i) for row, i in done for twin in self.scheduler.fork(row)]
            if done:
                self._decoding = None  # other rows decode from now on
                rows = [row for row, _ in done]
                self._write(rows, found[[i for _, i in done]], sampling_of(rows), ended)
        completions = [self._in_flight[name].completion(reason, self.version) for name, reason in ended.items()]
        for c in completions:
            row = self._in_flight[c.id]
            self._leave(row, held=row.request.hold)
        if completions:
            self._check_if_idle()
        return completions

    def _write(self, rows: list[Row], logits_BW: Tensor, how: SamplingRows, ended: dict[str, FinishReason]) -> Tensor:
        """Draw a token for every row and enter those that have ended. Returns the tokens."""
        drawn = sample(logits_BW, how)
        tokens, logprobs, raw = (x.tolist() for x in drawn)
        for i, row in enumerate(rows):
            self._append(row, tokens[i], logprobs[i], raw[i], (logits_BW, i), ended)
        return drawn[0]

    def _write_drafted(self, drafted: Drafted, ended: dict[str, FinishReason]) -> None:
        """Write what was verified, up to where a row ends, and go on from there."""
        found, written = drafted.verify(), []
        tokens, logprobs, raw = (x.tolist() for x in (found.tokens_BT, found.logprobs_BT, found.raw_logprobs_BT))
        counts = zip(drafted.proposal.counts_B.tolist(), found.accepted_B.tolist(), strict=True)
        for i, (row, (proposed, accepted)) in enumerate(zip(drafted.rows, counts, strict=True)):
            n = 0
            while n <= accepted and row.id not in ended:
                logits = drafted.logits_BTW, (i, n)
                self._append(row, tokens[i][n], logprobs[i][n], raw[i][n], logits, ended)
                n += 1
            row.drafts.count(proposed, min(n, accepted))
            written.append(n)
        assert self.speculation is not None
        self.speculation.confirm(drafted, written, self.scheduler)

    def _append(
        self,
        row: Row,
        token: int,
        logprob: float,
        raw: float,
        logits: tuple[Tensor, Any],
        ended: dict[str, FinishReason],
    ) -> None:
        """logits: those of the token are logits[0][logits[1]]; looked up where asked for, which is seldom."""
        if not row.logprobs and row.salt != self.salt and row.remembered:
            self.accounts.compare(self.model, row.tokens, logits[0][logits[1]])
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.raw_logprobs.append(raw)
        if row.request.top_logprobs:
            row.tops.append(top(logits[0][logits[1]], row.request.top_logprobs))
        if (reason := self._ends(row)) is not None:
            ended[row.id] = reason

    def _ends(self, row: Row) -> FinishReason | None:
        request = row.request
        if row.tokens[-1] in request.stop_ids:
            return "stop"
        if request.stop_texts and self.decode is not None:
            text = self.decode(row.said)
            if any(stop in text for stop in request.stop_texts):
                return "stop"
        return "length" if len(row.logprobs) >= request.max_tokens else None

    def _leave(self, row: Row, kept: bool = True, held: bool = False) -> None:
        """A request has ended. kept: what it computed goes to the cache; held: its next request may rely on it."""
        del self._in_flight[row.id]
        self._decoding = None
        known = tuple(row.tokens[: row.filled])
        node = self.scheduler.keep(row) if kept else None
        if held and node is not None:
            self._held[row.id] = _Held(known, node)
        self.scheduler.leave(row)
        self.accounts.ended(row)

    def _check_if_idle(self) -> None:
        if not self.busy:
            self.scheduler.check()
