"""What both OpenAI formats share: fields of a body, the shape of errors, usage and log-probs.

A field that would change the answer and is not served is refused by name; null always means absent. Fields that cannot
change the answer (user, metadata, ...) are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nonet.types import Sampling, UserError
from nonet.wire.ask import Ask, Head, Refusal, Usage, Written
from nonet.wire.sse import DONE, event

MOST_TOP_LOGPROBS = 20
_LEAST_TEMPERATURE = 1e-6
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """Fields of /v1/completions and /v1/chat/completions alike; top_k, min_p, repetition_penalty and
    return_token_ids are this server's own.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopText | list[StopText] | None = Field(None, max_length=16)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, lt=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] = Field({}, max_length=1024)
    return_token_ids: bool = False
    # Accepted because no value of them changes an answer here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("temperature")
    @classmethod
    def _not_vanishing(cls, value: float) -> float:
        """Log-probs divided by less would overflow."""
        if 0 < value < _LEAST_TEMPERATURE:
            raise ValueError(f"must be 0 (greedy) or at least {_LEAST_TEMPERATURE:g}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, data: Any) -> Any:
        """Null means absent; text must be text, numbers must be numbers, whatever a JSON parser lets through."""
        try:
            json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as e:
            raise ValueError("a string holds half a surrogate pair; send whole characters") from e
        except RecursionError as e:
            raise ValueError("the body is nested too deeply; send it flatter") from e
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(k), v) for k, v in self.logit_bias.items()),
        )

    def shared(self) -> dict[str, Any]:
        """The fields of an Ask that both formats fill alike."""
        if self.stream_options is not None and not self.stream:
            raise Refusal("stream_options: only with stream = true; leave it out", param="stream_options")
        return {
            "model": self.model,
            "sampling": self.sampling(),
            "seed": self.seed,
            "count": self.n,
            "stop_texts": self.stops,
            "token_ids": self.return_token_ids,
            "stream": self.stream,
            "usage_event": self.stream_options is not None and self.stream_options.include_usage,
        }


# ------------------------------------------------------------------------------ errors


def error_body(error: UserError) -> dict[str, Any]:
    """OpenAI's error object."""
    told = error if isinstance(error, Refusal) else Refusal(str(error))
    return {"error": {"message": told.message, "type": told.kind, "param": told.param, "code": told.code}}


def invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> Refusal:
    """Pydantic's errors about a body as one sentence: field, value, fix. Told is the deepest one: of the forms a field
    may take, the one the value came nearest to.
    """
    deepest = max(errors, key=lambda e: len(_place(e, body)))
    name = ".".join(_place(deepest, body)) or "body"
    if deepest["type"] == "json_invalid":
        return Refusal(f"body: not JSON: {deepest['ctx']['error']}; send one JSON object")
    if deepest["type"] == "extra_forbidden":
        return Refusal(f"{name} = {_short(deepest['input'])}: this server has no such field; leave it out", param=name)
    if deepest["type"] == "missing":
        return Refusal(f"{name}: missing; it must be given", param=name)
    reason = deepest["msg"].removeprefix("Value error, ")
    return Refusal(f"{name} = {_short(deepest['input'])}: {reason[:1].lower()}{reason[1:]}", param=name)


def _place(error: Mapping[str, Any], body: Any) -> list[str]:
    """The way to the value at fault. Pydantic also names the forms it tried; those are no keys of the body."""
    place: list[str] = []
    for key in error["loc"]:
        if (isinstance(body, dict) and key in body) or (isinstance(body, list) and key in range(len(body))):
            body = body[key]
            place.append(str(key))
    if error["type"] == "missing" and error["loc"][-1] != "body":
        place.append(str(error["loc"][-1]))
    return place


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ----------------------------------------------------------------------------- replies


class OpenAIReply:
    """What replies of both formats share. object, chunk_object: the API's names of a whole reply and a piece of one."""

    object: str
    chunk_object: str

    def __init__(self, ask: Ask, head: Head):
        self.ask, self.head = ask, head

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        h = self.head
        return {
            "id": h.id,
            "object": kind,
            "created": h.created,
            "model": h.model,
            "system_fingerprint": h.fingerprint,
            "choices": choices,
        }

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        told = {"usage": usage and usage_body(usage)} if self.ask.usage_event else {}
        return event({**self.envelope(self.chunk_object, choices), **told})

    def end(self, usage: Usage) -> Iterable[bytes]:
        if self.ask.usage_event:
            yield self.chunk([], usage)
        yield DONE

    def broken(self, refusal: Refusal) -> Iterable[bytes]:
        """A stream has no status left to change: the error is its last event."""
        yield event(error_body(refusal))

    def ids(self, written: Written) -> dict[str, Any]:
        """token_ids, and the log-probs they were drawn with: what RL trains on."""
        if not self.ask.token_ids:
            return {}
        return {
            "token_ids": [t.id for t in written.tokens],
            "token_logprobs": [t.drawn for t in written.tokens],
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }
