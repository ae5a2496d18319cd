"""A teacher behind HTTP: any OpenAI-style server that scores prompts (vLLM, SGLang, `nonet serve`).

    POST {address}/completions   {"prompt": [[ids], ...], "max_tokens": 0, "echo": true, "logprobs": 0}
    choices[i].logprobs          token_logprobs: one a prompt token, null for the first; tokens: their texts

Ids go out and numbers come back, so nothing is tokenised again. Such servers score at temperature 1, and say nothing
about their vocabulary but the texts of the ids they are sent: all of the student's are sent once, before training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from nonet.chat import Tokenizer
from nonet.engine.scoring import Passage
from nonet.types import UserError

PROMPTS = 8  # of one request
PROBE = 128  # ids of the vocabulary in one prompt
TRIES, BUSY = 6, (429, 502, 503, 504)  # a busy or restarting server is asked again after 1, 2, 4, ... seconds
LIMIT_S = 600.0


class ServedTeacher:
    """where: the address as given, http://host:port/v1, with #MODEL where it serves more than one. OPENAI_API_KEY is
    sent along where it is set.
    """

    def __init__(self, where: str, patience_s: float = 1.0):
        self.where, self._patience_s = where, patience_s
        address, _, self._model = where.partition("#")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(base_url=address.rstrip("/"), headers=headers, timeout=LIMIT_S)

    @property
    def model(self) -> str:
        """The name it serves under; asked for once."""
        if not self._model:
            names = [m["id"] for m in self._ask("GET", "/models")["data"]]
            if len(names) != 1:
                raise UserError(f"{self.where}: serves {', '.join(names) or 'nothing'}; name one as {self.where}#MODEL")
            self._model = names[0]
        return self._model

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
            body = {"prompt": part, "model": self.model, "max_tokens": 0, "echo": True, "logprobs": 0}
            choices = sorted(self._ask("POST", "/completions", body)["choices"], key=lambda c: c["index"])
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

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                answer = self._client.request(method, path, json=body)
            except httpx2.TransportError as e:
                if last:
                    raise UserError(f"{self.where}: no answer ({type(e).__name__}: {e}); is the server up?") from e
            else:
                if answer.is_success:
                    return answer.json()
                if last or answer.status_code not in BUSY:
                    raise UserError(f"{self.where}: {answer.status_code}: {answer.text[:300]}")
            time.sleep(self._patience_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")
