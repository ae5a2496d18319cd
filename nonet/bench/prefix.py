"""Share of prompt tokens the prefix cache saves a hybrid model at 48 snapshots, and time to first token without it.

40 conversations of 12 turns take turns, over 4 system prompts of 3,100 tokens; a turn adds 360 tokens and an answer of
24. Round robin is the worst order for a cache: everybody else speaks before a conversation goes on. `hit_48_retries`:
every fifth turn is asked again, or the conversation goes back one turn and on in another way. `possible` is what a
cache that forgets nothing would save: the longest prefix shared with anything said before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from nonet.engine import Engine
from nonet.model import Model, ModelConfig
from nonet.model.init import initialise
from nonet.progress import progress
from nonet.types import Completion, Request, Sampling

SNAPSHOTS, SYSTEMS, SYSTEM, CHATS, TURNS, ASKED, ANSWER = 48, 4, 3100, 40, 12, 360, 24
COLD_EVERY = 40  # of how many requests one is timed without a cache
Tokens = tuple[int, ...]


def measure(chats: int = CHATS, turns: int = TURNS, cold_every: int = COLD_EVERY) -> dict[str, Any]:
    model = tiny_hybrid()
    plain = replay(model, conversations(chats, turns, 0.0), "bench prefix: conversations", cold_every)
    retried = replay(model, conversations(chats, turns, 0.2), "bench prefix: with retries", cold_every)
    return {
        "hit_48": plain["hit"],
        "hit_48_retries": retried["hit"],
        "ttft_vs_off": plain["ttft_vs_off"],
        "ttft_vs_off_retries": retried["ttft_vs_off"],
        "possible": {"plain": plain["possible"], "retries": retried["possible"]},
        "ttft_ms": {"on": plain["on_ms"], "off": plain["off_ms"]},
        "requests": {"plain": plain["requests"], "retries": retried["requests"]},
        "misses": {"plain": plain["misses"], "retries": retried["misses"]},
        "snapshots": SNAPSHOTS,
    }


def tiny_hybrid() -> Model:
    """Three KDA layers and one MLA layer, 0.3M parameters."""
    config = ModelConfig(vocab_size=512, d_model=64, layers=4, heads=2, d_ff=128, max_position=1 << 14)
    return initialise(Model(config), 0).eval()


@dataclass
class Chat:
    """said[t]: the prompt of turn t and its answer."""

    system: int
    text: Tokens
    said: list[Tokens] = field(default_factory=list)


def conversations(chats: int, turns: int, retries: float) -> Iterator[tuple[Chat, Tokens, int]]:
    """(conversation, prompt, length of its system prompt), in the order they are asked. The caller appends prompt and
    answer to `said` before it asks for the next.
    """
    draw = random.Random(0)
    systems = [_words(draw, SYSTEM) for _ in range(SYSTEMS)]
    all_ = [Chat(i % SYSTEMS, systems[i % SYSTEMS]) for i in range(chats)]
    for _ in range(turns):
        for chat in all_:
            before = chat.said[-1] if chat.said else chat.text
            prompt = before + _words(draw, ASKED)
            yield chat, prompt, SYSTEM
            if draw.random() < retries:
                if draw.random() < 0.5:  # the same again
                    yield chat, prompt, SYSTEM
                else:  # from before this turn in another way
                    yield chat, before + _words(draw, ASKED), SYSTEM


def replay(model: Model, asked: Iterator[tuple[Chat, Tokens, int]], title: str, cold_every: int) -> dict[str, Any]:
    """One request after another through an engine with 48 snapshots; some also through one without a cache."""
    warm, cold = Engine(model, snapshots=SNAPSHOTS, cache_bytes=1 << 30), Engine(model, prefix_cache=False)
    known: list[np.ndarray] = []
    tokens = possible = count = 0
    times: list[tuple[float, float]] = []
    with progress(title, CHATS * TURNS) as bar:
        for chat, prompt, system in asked:
            edges, sampling = (system, len(prompt)), Sampling(seed=count)
            request = Request(f"r{count}", prompt, ANSWER, sampling=sampling, boundaries=edges)
            seconds, c = timed(warm, request)
            if count % cold_every == cold_every - 1:
                times.append((seconds, timed(cold, request)[0]))
            chat.said.append(prompt + c.tokens)
            tokens, possible, count = tokens + len(prompt), possible + _shared(prompt, known), count + 1
            known.append(np.array(chat.said[-1], np.int32))
            bar(min(count, CHATS * TURNS), f"{warm.accounts.totals['tokens_cached_total'] / tokens:.3f}")
    totals = warm.figures()
    return {
        "hit": totals["tokens_cached_total"] / tokens,
        "possible": possible / tokens,
        "ttft_vs_off": median(b / a for a, b in times),
        "on_ms": 1e3 * median(a for a, _ in times),
        "off_ms": 1e3 * median(b for _, b in times),
        "requests": count,
        "misses": {k[5:-6]: int(v) for k, v in totals.items() if k.startswith("miss_")},
    }


def timed(engine: Engine, request: Request) -> tuple[float, Completion]:
    """Seconds to the first token, and the whole completion."""
    began = time.perf_counter()
    engine.submit(request)
    first, done = 0.0, []
    while not done:
        done = engine.step()
        written = engine.written(request.id)
        if not first and (written is None or written.tokens):
            first = time.perf_counter() - began
    return first, done[0]


def _words(draw: random.Random, count: int) -> Tokens:
    return tuple(draw.randrange(512) for _ in range(count))


def _shared(prompt: Tokens, known: list[np.ndarray]) -> int:
    """Longest prefix that `prompt` shares with anything known, but for its last token."""
    mine, best = np.array(prompt[:-1], np.int32), 0
    for other in known:
        n = min(len(mine), len(other))
        if n > best and np.array_equal(mine[: best + 1], other[: best + 1]):
            apart = np.flatnonzero(mine[:n] != other[:n])
            best = int(apart[0]) if len(apart) else n
    return best
