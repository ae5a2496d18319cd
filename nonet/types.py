"""The nouns every room shares; the protocols rooms meet through are in protocols.py.

Owns: Message, Task, HarnessSpec, Segment, Trajectory, Request, Completion. Nothing here holds a tensor or does work;
the two nouns that do hold tensors live beside the code that fills them (`model.state.SequenceState`,
`rl.batch.PackedBatch`).

Invariant: `Trajectory.tokens` is exactly what the model saw, in order. Every trained token is one of these; text is
derived from tokens for people to read and never travels back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Author = Literal["prompt", "policy", "tool"]
Domain = Literal["general", "agents", "coding"]
EFFORTS = ("low", "high", "max")
FinishReason = Literal["stop", "length", "paused", "aborted", "running"]
Status = Literal["new", "parked", "done", "failed"]


class UserError(Exception):
    """A mistake in what the user gave us: one sentence with the field, the value and the fix."""


# ---------------------------------------------------------------- 1. Message


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking that precedes an answer; rendered between the harness's think marks."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """id: what a result refers to it by, in formats and templates that have such names."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """call: id of the ToolCall it answers, where there is one."""

    text: str
    error: bool = False
    call: str = ""


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    >>> Message.user("What is 3 + 4?").text
    'What is 3 + 4?'
    """

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.parts if isinstance(p, Text))

    @property
    def reasoning(self) -> str:
        return "".join(p.text for p in self.parts if isinstance(p, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(p for p in self.parts if isinstance(p, ToolCall))

    @staticmethod
    def system(text: str) -> Message:
        return Message("system", (Text(text),))

    @staticmethod
    def user(text: str) -> Message:
        return Message("user", (Text(text),))

    @staticmethod
    def assistant(text: str = "", reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Message:
        parts: tuple[Part, ...] = (Reasoning(reasoning),) if reasoning else ()
        if text:
            parts += (Text(text),)
        return Message("assistant", parts + tuple(calls))


# ------------------------------------------------------------------- 2. Task


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the policy may know it: a name, one sentence, a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SandboxRecipe:
    """What a sandbox starts from: relative path -> file text, and which tools it offers."""

    files: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `data` is for the verifier alone and is never rendered.

    `id` is unique over source, split and index ("general.add/train/17"); `seed` is the number its random choices came
    from; `rewards` names entries of the reward registry (`tasks.rewards`). effort: "" is a task without a level.
    """

    id: str
    prompt: tuple[Message, ...]
    domain: str = "general"
    effort: str = "max"
    rewards: tuple[str, ...] = ("exact",)
    sandbox: SandboxRecipe | None = None
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------ 3. HarnessSpec


@dataclass(frozen=True, slots=True)
class HarnessSpec:
    """An agent's whole interface as data: equal specs behave equally; `hash` is recorded with every trajectory.

    system        template of the system message; {effort} and {tools} are filled in, an empty result sends none
    effort        what {effort} becomes, itself a template of the level's name; nothing for a task without a level
    call_open/close, think_open/close   marks around a JSON tool call and around reasoning
    tool_role     role of the message that carries a tool's result ("tool", or "user" for templates without one)
    max_turns     assistant turns before the episode ends with stop reason "turns"
    """

    name: str
    system: str = ""
    effort: str = "{effort}"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    think_open: str = "<think>"
    think_close: str = "</think>"
    tool_role: Literal["tool", "user"] = "tool"
    max_turns: int = 8

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- 4. Segment


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one author under one policy version.

    Policy segments carry one log-prob per token, twice: `logprobs` after the sampling transform (temperature, top-k,
    top-p: the behaviour policy that drew the token) and `raw_logprobs` before it. A version boundary is a segment
    boundary. Prompt and tool segments carry neither. `texts` is what the tools printed (tool segments only): their
    tokens also hold the template's marks around it.
    """

    author: Author
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    policy_version: int = -1
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.tokens) if self.author == "policy" else 0
        if not (len(self.logprobs) == len(self.raw_logprobs) == expected):
            raise ValueError(
                f"{self.author} segment of {len(self.tokens)} tokens carries {len(self.logprobs)} behaviour and "
                f"{len(self.raw_logprobs)} raw log-probs; needs {expected} of each"
            )


# ------------------------------------------------------------- 5. Trajectory


@dataclass(slots=True)
class Trajectory:
    """Append-only segments of one attempt at one task.

    `group` counts task draws over the run, `sample` the siblings inside a group. `sandbox` is the last checkpoint
    (opaque, JSON-able); `rewards` fills when the trajectory is scored. `parent` names the trajectory this one was
    compacted or forked from. `attempt` counts how often it was started over from its prompt.
    """

    task_id: str
    group: int
    sample: int
    segments: list[Segment] = field(default_factory=list)
    status: Status = "new"
    stop_reason: str = ""
    sandbox: Any = None
    rewards: dict[str, float] = field(default_factory=dict)
    harness: str = ""
    parent: str | None = None
    attempt: int = 0

    @property
    def id(self) -> str:
        return f"group={self.group}/sample={self.sample}"

    @property
    def stream(self) -> str:
        """Names the random stream that draws its tokens; another attempt draws from another."""
        first = f"{self.task_id}#{self.group}/{self.sample}"
        return f"{first}/{self.attempt}" if self.attempt else first

    def restart(self) -> None:
        """Start over from the prompt: what was said and done is given up."""
        self.attempt, self.status, self.stop_reason, self.sandbox = self.attempt + 1, "new", "", None
        self.segments, self.rewards = [], {}

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for s in self.segments for t in s.tokens)

    def append(self, segment: Segment) -> None:
        """Add a segment; policy words under the last segment's version extend it, so pauses leave no trace there."""
        last = self.segments[-1] if self.segments else None
        if (
            last is None
            or (last.author, segment.author) != ("policy", "policy")
            or last.policy_version != segment.policy_version
        ):
            self.segments.append(segment)
        else:
            names = ("tokens", "logprobs", "raw_logprobs")
            self.segments[-1] = replace(last, **{n: getattr(last, n) + getattr(segment, n) for n in names})

    def last_turn(self) -> tuple[int, ...]:
        """The policy's tokens since the prompt or the last tool result, across pauses."""
        turn: tuple[int, ...] = ()
        for s in reversed(self.segments):
            if s.author != "policy":
                break
            turn = s.tokens + turn
        return turn

    @property
    def policy_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments if s.author == "policy")

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions in the order they wrote, each named once per run of segments."""
        out: list[int] = []
        for s in self.segments:
            if s.author == "policy" and (not out or out[-1] != s.policy_version):
                out.append(s.policy_version)
        return tuple(out)

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trajectory:
        segments = [
            Segment(
                s["author"],
                *(tuple(s[k]) for k in ("tokens", "logprobs", "raw_logprobs")),
                policy_version=s["policy_version"],
                texts=tuple(s["texts"]),
            )
            for s in data["segments"]
        ]
        return Trajectory(**{**data, "segments": segments})


# ---------------------------------------------------- 6. Request, Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep the whole vocabulary.

    Transforms apply in this order: penalties and logit_bias on logits, temperature, top-k, top-p, min-p (a share of the
    most likely token's probability). repetition_penalty looks at prompt and completion (logits of seen tokens divided
    by it where positive, multiplied where negative); presence and frequency penalties look at the completion alone and
    are subtracted, as OpenAI defines them. logit_bias: (token id, added to its logit) pairs.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # also refuses nan
            raise UserError(f"temperature = {self.temperature}: must be 0 (greedy) or positive and finite")
        if self.top_k < 0:
            raise UserError(f"top_k = {self.top_k}: must be 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must lie in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min_p = {self.min_p}: must lie in [0, 1)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UserError(f"{name} = {getattr(self, name)}: must lie in [-2, 2]")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition_penalty = {self.repetition_penalty}: must be positive and finite; 1 is off")
        if not all(math.isfinite(bias) for _, bias in self.logit_bias):
            raise UserError("logit_bias: every bias must be finite; -100 is enough to ban a token")


@dataclass(frozen=True, slots=True)
class Request:
    """The engine's only door: token ids in, token ids out.

    stream       names the random stream: (seed, stream, position in the context) decides each draw, so a result
                 depends neither on batch-mates nor on where a pause fell (law 18)
    hold         remember the state when this request stops, for a later request of the same id whose tokens extend it
    stop_texts   end when the completion's text contains one of these (the engine needs a decoder for it)
    boundaries   how many tokens of the prompt each message ends at, ascending: where the prefix cache takes snapshots
    top_logprobs how many of the most likely tokens are reported with their log-probs before the sampling transform
    resumed      how many of the last tokens are the completion's own, written before a pause: penalties and stop_texts
                 look at them too
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    stream: str = ""
    hold: bool = False
    stop_texts: tuple[str, ...] = ()
    boundaries: tuple[int, ...] = ()
    top_logprobs: int = 0
    resumed: int = 0

    def continued(self, completion: Completion) -> Request:
        """The request that finishes a paused completion; its budget shrinks by what was already written."""
        written = len(completion.tokens)
        return replace(
            self,
            tokens=self.tokens + completion.tokens,
            max_tokens=self.max_tokens - written,
            resumed=self.resumed + written,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine wrote for one request. A stop token that was sampled is part of `tokens`, and so are the tokens
    that complete a stop text. top_logprobs: (token id, raw log-prob) of the most likely tokens, a tuple a position,
    where they were asked for. cached_tokens: how much of the prompt was remembered instead of computed. drafted_tokens:
    how many were proposed by a draft, of which accepted_tokens are among `tokens`.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
