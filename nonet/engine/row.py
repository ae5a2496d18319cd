"""One request in flight, and what may be asked for at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nonet.engine.sampler import Edit
from nonet.engine.snapshots import Kind, Salt, Snapshot
from nonet.model.config import ModelConfig
from nonet.model.state import PAGE
from nonet.ops.rng import stream_key
from nonet.types import Completion, FinishReason, Request, UserError

Top = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Drafts:
    """What was drafted for one request, or many. steps: how often the model was asked for what follows what is written.
    proposed[k], accepted[k]: in how many of these at least k+1 tokens were proposed, or accepted (and not cut off by a
    stop), so accepted[k] counts joint prefixes.
    """

    steps: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, proposed: int, accepted: int) -> None:
        """One more step."""
        self.steps += 1
        self._room(proposed)
        for k in range(proposed):
            self.proposed[k] += 1
            self.accepted[k] += k < accepted

    def add(self, other: Drafts) -> None:
        self.steps += other.steps
        self._room(len(other.proposed))
        for k, (proposed, accepted) in enumerate(zip(other.proposed, other.accepted, strict=True)):
            self.proposed[k] += proposed
            self.accepted[k] += accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens written by a step that verified drafts, the bonus (or corrected) token included: from 1 to K+1."""
        return 1 + sum(self.accepted) / self.proposed[0] if self.proposed else 1.0

    def _room(self, positions: int) -> None:
        missing = [0] * (positions - len(self.proposed))
        self.proposed += missing
        self.accepted += missing


@dataclass(frozen=True, slots=True)
class Report:
    """How much of one request was remembered: tokens whose pages were found, where the snapshot stood that let it start
    (-1: none), what was not computed again, and why there was not more (see prefix.Match; "off" without a cache); and
    what was drafted, in an engine with a drafter.
    """

    prompt: int
    paged: int
    snapshot: int
    cached: int
    reason: str
    drafts: Drafts | None = None


@dataclass(eq=False)
class Row:
    """Known tokens are the prompt and what was written; the first `filled` of them are in memory.

    Waiting rows have no pages and no slot, and nothing filled. `pages` covers every filled position; only the last of
    them, if partly filled, is ever written to.
    """

    request: Request
    salt: Salt
    tokens: list[int]
    key: tuple[int, int]
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)  # of the drawn-th run of positions, filled by feed.draws
    drawn: int = -1
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    filled: int = 0
    chain: list[bytes] = field(default_factory=list)  # digests of whole pages of known tokens
    cuts: dict[int, Kind] = field(default_factory=dict)  # where a snapshot is taken on the way, multiples of PAGE
    last: Snapshot | None = None  # of its conversation
    followers: list[Row] = field(default_factory=list)  # rows of the same prompt, which wait for it
    report: Report | None = None  # of the first time it was given a place
    entered: int = 1  # the draft's entries before this position are true (drafter.py); position 0 has none
    drafts: Drafts = field(default_factory=Drafts)

    @staticmethod
    def of(request: Request, salt: Salt) -> Row:
        return Row(request, salt, list(request.tokens), stream_key(request.sampling.seed, request.stream or request.id))

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def placed(self) -> bool:
        return self.slot >= 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Known tokens that memory does not have yet; at least one, whose logits decide the next token."""
        return len(self.tokens) - self.filled

    @property
    def left(self) -> int:
        """Tokens it may still write."""
        return self.request.max_tokens - len(self.logprobs)

    @property
    def remembered(self) -> bool:
        """Whether it started from the cache."""
        return self.report is not None and self.report.cached > 0

    @property
    def edited(self) -> bool:
        """Whether its logits are penalised or biased."""
        return Edit.wanted(self.request.sampling)

    @property
    def said(self) -> list[int]:
        """The completion so far, with what was written before a pause."""
        return self.tokens[len(self.request.tokens) - self.request.resumed :]

    def completion(self, reason: FinishReason, version: int, since: int = 0) -> Completion:
        return Completion(
            self.id,
            tuple(self.tokens[len(self.request.tokens) + since :]),
            tuple(self.logprobs[since:]),
            tuple(self.raw_logprobs[since:]),
            reason,
            version,
            tuple(self.tops[since:]),
            self.report.cached if self.report else 0,
            sum(self.drafts.proposed),
            sum(self.drafts.accepted),
        )


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)


def check_request(request: Request, config: ModelConfig, pages: int | None, can_decode: bool) -> None:
    """UserError, naming the limit, for what can never be served. pages: how many there can be."""
    r, name = request, f"request {request.id}"
    if not r.tokens:
        raise UserError(f"{name}: no tokens; a completion needs at least one token of context")
    if r.max_tokens < 1:
        raise UserError(f"{name}: max_tokens = {r.max_tokens}; must be at least 1")
    total = len(r.tokens) + r.max_tokens
    if total > config.max_position:
        raise UserError(
            f"{name}: {len(r.tokens)} tokens + max_tokens {r.max_tokens} = {total} "
            f"exceeds the model's {config.max_position} positions"
        )
    if pages is not None and pages_for(total) > pages:
        raise UserError(
            f"{name}: {len(r.tokens)} tokens + max_tokens {r.max_tokens} = {total} exceeds the engine's memory of "
            f"{pages * PAGE} positions ({pages} pages)"
        )
    _check_ids(name, "token id", (min(r.tokens), max(r.tokens)), config.vocab_size)
    _check_ids(name, "logit_bias of token", [token for token, _ in r.sampling.logit_bias], config.vocab_size)
    if not 0 <= r.top_logprobs <= config.vocab_size:
        raise UserError(f"{name}: top_logprobs = {r.top_logprobs}; must be from 0 to {config.vocab_size}")
    if not 0 <= r.resumed <= len(r.tokens):
        raise UserError(f"{name}: resumed = {r.resumed}; must be from 0 to {len(r.tokens)}, its tokens")
    if r.stop_texts and not can_decode:
        raise UserError(f"{name}: stop_texts need an engine that can decode; give it a tokenizer, or use stop_ids")
    if "" in r.stop_texts:
        raise UserError(f"{name}: stop_texts holds an empty text, which every completion contains; leave it out")
    if any(a >= b for a, b in pairwise((0, *r.boundaries, len(r.tokens) + 1))):
        raise UserError(f"{name}: boundaries = {r.boundaries[:8]}; must ascend from 1 to at most {len(r.tokens)}")


def _check_ids(name: str, what: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"{name}: {what} {token} outside the vocabulary of {vocab_size}")
