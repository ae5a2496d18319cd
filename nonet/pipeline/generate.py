"""Stream a model's answer as text: one request through the engine, decoded as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nonet.chat import Tokenizer
from nonet.engine import Engine
from nonet.model import hf
from nonet.types import Request, Sampling


def stream(
    directory: Path, prompt: str, sampling: Sampling, max_tokens: int, system: str = "", raw: bool = False
) -> Iterator[str]:
    """Yield text as it becomes certain: a character whose bytes are not all there yet waits for the next token."""
    tokenizer = Tokenizer(directory)
    engine = Engine(hf.load(directory))
    engine.submit(Request("generate", _ids(tokenizer, prompt, system, raw), max_tokens, tokenizer.stop_ids, sampling))
    shown, ids = "", []
    while engine.busy:
        done = engine.step()
        completion = done[0] if done else engine.written("generate")
        ids = list(completion.tokens) if completion else []
        text = tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.stop_ids else ids)
        if not done and text.endswith("\ufffd"):
            continue
        yield text[len(shown) :]
        shown = text


def _ids(tokenizer: Tokenizer, prompt: str, system: str, raw: bool) -> tuple[int, ...]:
    if raw:
        return tuple(tokenizer.encode(prompt))
    messages = [{"role": "system", "content": system}] if system else []
    return tuple(tokenizer.prompt([*messages, {"role": "user", "content": prompt}]))
