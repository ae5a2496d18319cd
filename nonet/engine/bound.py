"""How far the fast mode is from the deterministic one, measured on a model of a given shape."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import torch

from nonet.engine.engine import Engine
from nonet.model import Model, ModelConfig
from nonet.model.init import initialise
from nonet.types import Completion, Request

PROMPTS, WRITTEN = (5, 16, 33, 64), 24


@dataclass(frozen=True)
class Bound:
    """worst: largest |log-prob difference| of `tokens` tokens; same: whether both modes wrote the same ones."""

    worst: float
    tokens: int
    same: bool


@torch.inference_mode()
def fast_bound(config: ModelConfig) -> Bound:
    """Random weights; prompts of several lengths, two requests on each, then each prompt extended by its answer:
    through the batched engine with its cache, and token by token without one.
    """
    model = initialise(Model(config), 0).eval()
    fast, slow = Engine(model), Engine(model, deterministic=True, prefix_cache=False)
    first = [_request(config, f"{n}/{i}", n) for n in PROMPTS for i in range(2)]
    done, want = _run(fast, first), _run(slow, first)
    again = [Request(f"{r.id}+", r.tokens + done[r.id].tokens + r.tokens[:3], WRITTEN) for r in first]
    done, want = done | _run(fast, again), want | _run(slow, again)
    apart = [x for name, c in done.items() for x in _apart(c, want[name])]
    same = all(c.tokens == want[name].tokens for name, c in done.items())
    return Bound(max(apart), len(apart), same)


def _apart(a: Completion, b: Completion) -> list[float]:
    """Log-prob differences of the tokens both wrote, up to the first that is another."""
    pairs = zip(a.tokens, b.tokens, a.raw_logprobs, b.raw_logprobs, strict=True)
    return [abs(x - y) for _, _, x, y in takewhile(lambda p: p[0] == p[1], pairs)]


def _request(config: ModelConfig, name: str, length: int) -> Request:
    generator = torch.Generator().manual_seed(length)
    return Request(name, tuple(torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()), WRITTEN)


def _run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    for r in requests:
        engine.submit(r)
    return {c.id: c for c in engine.run()}
