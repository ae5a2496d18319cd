"""A teacher behind HTTP: any OpenAI-style server that scores prompts (vLLM, SGLang, `nonet serve`).

    POST {address}/completions   {"prompt": [[ids], ...], "max_tokens": 0, "echo": true, "logprobs": 0}
    choices[i].logprobs          token_logprobs: one a prompt token, null for the first; tokens: their texts

Ids go out and numbers come back, so nothing is tokenised again. Such servers score at temperature 1, and say nothing
about their vocabulary but the texts of the ids they are sent: all of the student's are sent once, before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nonet.chat import Tokenizer
from nonet.engine.scoring import Passage
from nonet.rl.endpoint import Endpoint
from nonet.types import UserError

PROMPTS = 8  # of one request
PROBE = 128  # ids of the vocabulary in one prompt


class ServedTeacher:
    """where: as `Endpoint` takes it."""

    def __init__(self, where: str, endpoint: Endpoint | None = None):
        self.where = where
        self._endpoint = endpoint or Endpoint(where)

    def logprobs(self, passages: Sequence[Passage], temperature: float) -> list[list[float]]:
        if temperature != 1:
            raise UserError(
                f"{self.where}: a served teacher scores at temperature 1 and the student samples at {temperature:g}; "
                "set rl.temperature = 1, or name the teacher's directory"
            )
        scored = self._scored([p.tokens for p in passages])
        return [logprobs[p.first :] for p, (logprobs, _) in zip(passages, scored, strict=True)]

    def require_vocabulary(self, student: Tokenizer, who: str) -> None:
        """UserError unless every id of the student's means the same text here, as far as single tokens have texts."""
        size = student.vocab_size
        prompts = [tuple(range(i, min(i + PROBE, size))) for i in range(0, size, PROBE)]
        for ids, (_, texts) in zip(prompts, self._scored(prompts), strict=True):
            for i, theirs in zip(ids, texts, strict=True):
                ours = student.decode([i])
                if ours and "\ufffd" not in ours and theirs != ours:
                    raise UserError(
                        f"{who} = {self.where}: another vocabulary: id {i} is {ours!r} for the student and {theirs!r} "
                        "for the teacher; use a teacher with the student's tokenizer"
                    )

    def _scored(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[tuple[list[float], list[str]]]:
        """(log-prob of each token, its text) of each prompt; the first log-prob is nan."""
        for start in range(0, len(prompts), PROMPTS):
            part = prompts[start : start + PROMPTS]
            body = {"prompt": part, "model": self._endpoint.model, "max_tokens": 0, "echo": True, "logprobs": 0}
            choices = sorted(self._endpoint.ask("POST", "/completions", body)["choices"], key=lambda c: c["index"])
            if len(choices) != len(part):
                raise UserError(f"{self.where}: {len(choices)} answers to {len(part)} prompts; it cannot score prompts")
            for prompt, choice in zip(part, choices, strict=True):
                yield self._read(prompt, choice.get("logprobs"))

    def _read(self, prompt: tuple[int, ...], told: Any) -> tuple[list[float], list[str]]:
        found = (told or {}).get("token_logprobs") or []
        values = found[1 : len(prompt)]  # some servers write a token all the same; it is no part of the prompt
        if len(found) < len(prompt) or any(v is None for v in values):
            raise UserError(
                f"{self.where}: {len(found)} log-probs for a prompt of {len(prompt)} tokens; the teacher must be a "
                "server that answers echo with logprobs, as vLLM and nonet serve do"
            )
        return [float("nan"), *values], told["tokens"][: len(prompt)]
