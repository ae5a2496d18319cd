"""Law 3: cache on == cache off, token for token, whatever is split, branched, preempted, evicted, paused or swapped."""

from __future__ import annotations

from collections import Counter

import pytest
import tiny
import torch
from engine_programs import SMALL, TIGHT, Program, alone, weights

from nonet.engine import Engine
from nonet.types import Completion

TWO = dict(layers=2, mixers=("kda", "mla"))
# The experts of these tests are loud: float32 alone is worth 2.5e-5 there.
EXACT = dict(dtype=torch.float64)
MODELS = {"hybrid": ("hybrid", TWO), "gqa": ("gqa", {}), "k3": ("k3", EXACT), "kimi_linear": ("kimi_linear", EXACT)}


def check(kind: str, over: dict, seed: int, deterministic: bool) -> Counter[str]:
    """One program, all of whose completions must be those of requests alone. Returns what it went through."""
    made, versions = tiny.model(kind, **{**SMALL, **over}), weights(kind, **over)
    program = Program(Engine(made, deterministic=deterministic, **TIGHT), versions, seed)
    for _ in program.run():
        pass
    found = {k: int(v) for k, v in program.engine.figures().items()}
    expected = alone(tiny.model(kind, **{**SMALL, **over}), versions, program, deterministic)
    assert program.done.keys() | program.aborted.keys() == program.asked.keys()
    for name, c in program.done.items():
        agree(c, expected[name], 0 if deterministic else 1e-5)
    for name, c in program.aborted.items():
        n = len(c.tokens)
        assert c.tokens == expected[name].tokens[:n], f"seed {seed}: {name}, aborted"
    return Counter(found)


def agree(c: Completion, expected: Completion, bound: float) -> None:
    assert (c.tokens, c.finish_reason) == (expected.tokens, expected.finish_reason), c.id
    assert c.logprobs == pytest.approx(expected.logprobs, abs=bound, rel=0), c.id
    assert c.raw_logprobs == pytest.approx(expected.raw_logprobs, abs=bound, rel=0), c.id


def run(kind: str, seeds: range, deterministic: bool) -> None:
    through: Counter[str] = Counter()
    for seed in seeds:
        through += check(*MODELS[kind], seed, deterministic)
    assert through["tokens_cached_total"] and through["preemptions_total"], "the programs test nothing"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_deterministic_programs_are_bitwise_what_requests_alone_write(first):
    run("hybrid", range(first, first + 20), True)


@pytest.mark.parametrize(("kind", "first"), [*(("hybrid", n) for n in range(60, 140, 20)), ("gqa", 140), ("k3", 160),
                                             ("kimi_linear", 180)])  # fmt: skip
def test_fast_programs_have_the_same_tokens_and_logprobs_within_1e_5(kind, first):
    run(kind, range(first, first + 20), False)
