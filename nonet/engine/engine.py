"""Continuous batching over one model: many requests decode together, each as if alone.

The rows that decode are always the first `len(self._active)` rows of one SequenceState, so a step works on views; a row
that ends is filled by the last. Three things save prefill: equal prompts waiting together are computed once; a finished
request that was submitted with `hold` keeps its state, and the next request whose tokens extend it starts from there;
both are dropped by `load`, because memory written by other weights would lie.

`deterministic=True` feeds every token alone, one row at a time. A result then depends, to the last bit, on nothing but
weights, tokens and stream: the slow twin of the batched path (laws 8, 9, 17, 18).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nonet.engine.sampler import SamplingRows, sample
from nonet.model import Model, SequenceState
from nonet.model.native_decode import NativeDecoder
from nonet.ops.rng import stream_key, uniforms
from nonet.types import Completion, FinishReason, Request, UserError

_GROW = 64
_AHEAD = 64  # draws computed at once per row: numpy needs hardly longer for 64 than for one
_GATHER_SHARE, _GATHER_STEPS = 8, 4


@dataclass
class _Row:
    """One request in flight: its prompt is request.tokens, what it wrote so far is here."""

    request: Request
    key: tuple[int, int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)  # of _AHEAD positions, filled by _draws

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.tokens)


@dataclass
class _Held:
    """State of a finished request after `tokens` (its last sampled token is not yet in it)."""

    tokens: tuple[int, ...]
    state: SequenceState
    row: int


@dataclass
class _Steady:
    """What decode steps over the same rows share: their place in the state, what they are fed, how they sample."""

    state: SequenceState
    last_B1: Tensor
    sampling: SamplingRows
    longest: int


@dataclass
class _Plan:
    """What one step runs: rows of `state` (in order), the tokens each is fed, and the rows these results belong to."""

    rows: list[_Row]
    arriving: bool


class Engine:
    """A `types.Generator` over a `Model`, which it shares with its owner and never changes."""

    def __init__(
        self,
        model: Model,
        max_batch: int = 256,
        deterministic: bool = False,
        version: int = 0,
        native: bool = True,
    ):
        """native: decode through C where the machine and the model allow it (float32 on a CPU with a compiler)."""
        self._native = NativeDecoder.of(model) if native and not deterministic else None
        self.model, self.max_batch, self.deterministic, self.version = model, max_batch, deterministic, version
        self.context = model.config.max_position
        self._waiting: deque[Request] = deque()
        self._active: list[_Row] = []
        self._in_flight: dict[str, None] = {}  # ids of both, in order of arrival
        self._held: dict[str, _Held] = {}
        self._state: SequenceState | None = None
        self._steady: _Steady | None = None  # dropped whenever a row comes, goes or moves
        self._gathered = 0
        self.decode_steps = 0

    # ------------------------------------------------------------ the door

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    def submit(self, request: Request) -> None:
        config = self.model.config
        if request.id in self._in_flight:
            raise UserError(
                f"request {request.id}: a request of this id is in flight; ids must be unique until they end"
            )
        if not request.tokens:
            raise UserError(f"request {request.id}: no tokens; a completion needs at least one token of context")
        if request.max_tokens < 1:
            raise UserError(f"request {request.id}: max_tokens = {request.max_tokens}; must be at least 1")
        if (total := len(request.tokens) + request.max_tokens) > config.max_position:
            raise UserError(
                f"request {request.id}: {len(request.tokens)} tokens + max_tokens {request.max_tokens} = {total} "
                f"exceeds the model's {config.max_position} positions"
            )
        for worst in (max(request.tokens), min(request.tokens)):
            if not 0 <= worst < config.vocab_size:
                raise UserError(f"request {request.id}: token id {worst} outside the vocabulary of {config.vocab_size}")
        self._in_flight[request.id] = None
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Feed arrivals, or decode one token for every active row. Returns what ended."""
        if not self.busy:
            return []
        plan = self._schedule()
        logits_BW = self._forward(plan)
        return self._commit(plan, logits_BW)

    def written(self, request_id: str, since: int = 0) -> Completion | None:
        """See protocols.Generator."""
        if request_id not in self._in_flight:
            return None
        row = next((row for row in self._active if row.request.id == request_id), None)
        if row is None:
            return Completion(request_id, (), (), (), "running", self.version)
        logprobs, raw = tuple(row.logprobs[since:]), tuple(row.raw_logprobs[since:])
        return Completion(request_id, tuple(row.tokens[since:]), logprobs, raw, "running", self.version)

    def run(self) -> list[Completion]:
        """Step until nothing is left."""
        done: list[Completion] = []
        while self.busy:
            done += self.step()
        return done

    def pause(self) -> list[Completion]:
        """Stop everything in flight; each request comes back as an honest partial Completion, in order of arrival."""
        partial = [self._completion(row, "paused") for row in self._active]
        partial += [Completion(r.id, (), (), (), "paused", self.version) for r in self._waiting]
        arrival = {name: i for i, name in enumerate(self._in_flight)}
        self._active, self._state, self._steady, self._gathered = [], None, None, 0
        self._waiting.clear()
        self._in_flight.clear()
        self._held.clear()
        return sorted(partial, key=lambda c: arrival[c.id])

    @torch.inference_mode()
    def abort(self, request_id: str) -> Completion | None:
        """End a request wherever it is; what was held for its id is forgotten too."""
        written = self.written(request_id)
        self._in_flight.pop(request_id, None)
        self._waiting = deque(r for r in self._waiting if r.id != request_id)
        self._held.pop(request_id, None)
        for i, row in enumerate(self._active):
            if row.request.id == request_id:
                self._remove([i])
                break
        return None if written is None else replace(written, finish_reason="aborted")

    def load(self, version: int) -> None:
        """The shared model's weights are now `version`. Nothing may be in flight; held states are dropped."""
        if self.busy:
            raise RuntimeError("load() while requests are in flight; pause() first")
        self._held.clear()
        self.version = version
        if self._native is not None:
            self._native.refresh()

    # ------------------------------------------------------- one step, thrice

    def _schedule(self) -> _Plan:
        room = self.max_batch - len(self._active)
        # A forward for one newcomer costs nearly as much as one for many: while most rows are busy decoding, let
        # newcomers gather for a few steps. Counted in steps, so a replay gathers the same ones.
        gathering = len(self._waiting) * _GATHER_SHARE < len(self._active) and self._gathered < _GATHER_STEPS
        if not self._waiting or room == 0 or gathering:
            self._gathered += bool(self._waiting)
            return _Plan(self._active, arriving=False)
        self._gathered = 0
        # Rows that extend a held state and rows that start fresh are separate forwards: the latter need no mask.
        extends = self._extends_held(self._waiting[0])
        taken: list[Request] = []
        while self._waiting and len(taken) < room and self._extends_held(self._waiting[0]) == extends:
            taken.append(self._waiting.popleft())
        return _Plan([_Row(r, stream_key(r.sampling.seed, r.stream or r.id)) for r in taken], arriving=True)

    def _forward(self, plan: _Plan) -> Tensor:
        if not plan.arriving:
            self.decode_steps += 1
            steady = self._same_rows()
            return self._feed(steady.last_B1, steady.state, None)
        if self._extends_held(plan.rows[0].request):
            state, logits_BW = self._extend_held(plan.rows)
        else:
            state, logits_BW = self._prefill(plan.rows)
        at, self._steady = len(self._active), None
        self._reserve(at + len(plan.rows), max(r.length for r in plan.rows) + 1)
        assert self._state is not None
        self._state.write(at, state)
        return logits_BW

    def _commit(self, plan: _Plan, logits_BW: Tensor) -> list[Completion]:
        steady = self._steady
        how = _sampling(plan.rows) if steady is None else steady.sampling
        how.draws = _draws(plan.rows)
        drawn = sample(logits_BW, how)
        tokens, logprobs, raw = (x.tolist() for x in drawn)
        if steady is not None:
            steady.last_B1 = drawn[0].unsqueeze(1)
            steady.longest += 1
            how.positions += 1
        offset = len(self._active) if plan.arriving else 0
        if plan.arriving:
            self._active = self._active + plan.rows
        ended: list[tuple[int, FinishReason]] = []
        for i, row in enumerate(plan.rows):
            row.tokens.append(tokens[i])
            row.logprobs.append(logprobs[i])
            row.raw_logprobs.append(raw[i])
            if tokens[i] in row.request.stop_ids:
                ended.append((offset + i, "stop"))
            elif len(row.tokens) >= row.request.max_tokens:
                ended.append((offset + i, "length"))
        completions = [self._completion(self._active[i], reason) for i, reason in ended]
        if ended:
            for c in completions:
                del self._in_flight[c.id]
            self._hold([i for i, _ in ended if self._active[i].request.hold])
            self._remove([i for i, _ in ended])
        return completions

    # --------------------------------------------------------------- prefill

    def _prefill(self, rows: list[_Row]) -> tuple[SequenceState, Tensor]:
        """Fresh prompts, each distinct one computed once."""
        prompts: dict[tuple[int, ...], int] = {}
        index = [prompts.setdefault(r.request.tokens, len(prompts)) for r in rows]
        tokens_BT, counts_B = _padded(list(prompts))
        state = self._new_state(len(prompts), tokens_BT.shape[1])
        logits_BW = self._feed(tokens_BT, state, counts_B)
        if len(prompts) == len(rows):
            return state, logits_BW
        return state.select(index), logits_BW[index]

    def _extend_held(self, rows: list[_Row]) -> tuple[SequenceState, Tensor]:
        """Requests whose earlier tokens are already remembered: only the rest is computed."""
        held = [self._held.pop(r.request.id) for r in rows]
        suffixes = [r.request.tokens[len(h.tokens) :] for r, h in zip(rows, held, strict=True)]
        tokens_BT, counts_B = _padded(suffixes)
        state = self._new_state(len(rows), max(len(h.tokens) for h in held) + tokens_BT.shape[1])
        for i, h in enumerate(held):
            state.write(i, h.state.select([h.row]))
        return state, self._feed(tokens_BT, state, counts_B)

    def _feed(self, tokens_BT: Tensor, state: SequenceState, counts_B: Tensor | None) -> Tensor:
        """Logits after each row's last real token."""
        if self.deterministic:
            return self._feed_alone(tokens_BT, state, counts_B)
        if self._native is not None and tokens_BT.shape[1] == 1:
            return self._native.step(tokens_BT, state)
        hidden = self.model(tokens_BT, state, counts_B)
        if counts_B is None:
            return self.model.logits(hidden[:, -1])
        return self.model.logits(hidden[torch.arange(len(counts_B)), counts_B - 1])

    def _feed_alone(self, tokens_BT: Tensor, state: SequenceState, counts_B: Tensor | None) -> Tensor:
        counts = [tokens_BT.shape[1]] * len(tokens_BT) if counts_B is None else counts_B.tolist()
        out = []
        for b, n in enumerate(counts):
            row = state.rows(b, b + 1)
            hidden = [self.model(tokens_BT[b : b + 1, t : t + 1], row) for t in range(n)]
            out.append(self.model.logits(hidden[-1][:, -1]))
        return torch.cat(out)

    # ------------------------------------------------------------ bookkeeping

    def _extends_held(self, request: Request) -> bool:
        held = self._held.get(request.id)
        if held is None:
            return False
        n = len(held.tokens)
        return len(request.tokens) > n and request.tokens[:n] == held.tokens

    def _hold(self, indices: list[int]) -> None:
        if not indices or self._state is None:
            return
        kept = self._state.select(indices)
        for j, i in enumerate(indices):
            row = self._active[i]
            known = row.request.tokens + tuple(row.tokens[:-1])
            self._held[row.request.id] = _Held(known, kept, j)

    def _remove(self, indices: list[int]) -> None:
        """Fill each freed row with the last one, highest first so that the last is always a survivor."""
        assert self._state is not None
        self._steady = None
        active = list(self._active)
        for i in sorted(indices, reverse=True):
            last = len(active) - 1
            if i != last:
                self._state.move(last, i)
                active[i] = active[last]
            active.pop()
        self._active = active

    def _same_rows(self) -> _Steady:
        """The record of the active rows, made anew after a change, with room for what they are fed next."""
        if self._steady is None:
            last = torch.tensor([[r.tokens[-1]] for r in self._active])
            longest = max(r.length for r in self._active)
            self._steady = _Steady(self._view(longest), last, _sampling(self._active), longest)
        elif self._steady.longest > self._steady.state.capacity:
            self._steady.state = self._view(self._steady.longest)
        return self._steady

    def _view(self, capacity: int) -> SequenceState:
        """The active rows of the state, which has room for `capacity` positions."""
        self._reserve(len(self._active), capacity)
        assert self._state is not None
        return self._state.rows(0, len(self._active))

    def _reserve(self, batch: int, capacity: int) -> None:
        if self._state is None:
            self._state = self._new_state(min(self.max_batch, max(batch, 8)), capacity)
        elif batch > self._state.batch or capacity > self._state.capacity:
            enough = batch <= self._state.batch
            rows = self._state.batch if enough else min(self.max_batch, max(batch, 2 * self._state.batch))
            self._state = self._state.resized(rows, max(self._state.capacity, _rounded(capacity)))

    def _new_state(self, batch: int, capacity: int) -> SequenceState:
        weight = self.model.embed_tokens.weight
        return SequenceState.new(self.model.config, batch, _rounded(capacity), weight.dtype, weight.device)

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        return Completion(
            row.request.id, tuple(row.tokens), tuple(row.logprobs), tuple(row.raw_logprobs), reason, self.version
        )


def _rounded(capacity: int) -> int:
    return -(-capacity // _GROW) * _GROW


def _padded(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor | None]:
    counts = [len(r) for r in rows]
    longest = max(counts)
    tokens = torch.tensor([[*r, *([0] * (longest - len(r)))] for r in rows])
    return tokens, None if min(counts) == longest else torch.tensor(counts)


def _sampling(rows: list[_Row]) -> SamplingRows:
    params = [r.request.sampling for r in rows]
    return SamplingRows(
        temperature=np.array([p.temperature for p in params]),
        top_k=np.array([p.top_k for p in params]),
        top_p=np.array([p.top_p for p in params]),
        keys=np.array([r.key for r in rows], np.uint64),
        positions=np.array([r.length for r in rows], np.uint64),
    )


def _draws(rows: list[_Row]) -> np.ndarray:
    """The uniform of each row's next position: a pure function of its key and position, computed _AHEAD at once."""
    due = [r for r in rows if len(r.tokens) % _AHEAD == 0]
    if due:
        keys = np.repeat(np.array([r.key for r in due], np.uint64), _AHEAD, axis=0)
        positions = np.array([r.length for r in due], np.uint64)[:, None] + np.arange(_AHEAD, dtype=np.uint64)
        for row, ahead in zip(due, uniforms(keys, positions.reshape(-1)).reshape(-1, _AHEAD).tolist(), strict=True):
            row.draws = ahead
    return np.array([r.draws[len(r.tokens) % _AHEAD] for r in rows])
