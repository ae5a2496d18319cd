"""Law 3: cache on == cache off, token for token, whatever is split, branched, preempted, evicted, paused or swapped."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_programs import check, seeds


def run(kind: str, those: range, deterministic: bool) -> None:
    through: Counter[str] = Counter()
    for seed in those:
        through += check(kind, seed, deterministic)
    assert through["tokens_cached_total"] and through["preemptions_total"], "the programs test nothing"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_deterministic_programs_are_bitwise_what_requests_alone_write(first):
    run("hybrid", seeds(first, 20), True)


@pytest.mark.parametrize(("kind", "first"), [*(("hybrid", n) for n in range(60, 140, 20)), ("gqa", 140), ("k3", 160),
                                             ("kimi_linear", 560)])  # fmt: skip
def test_fast_programs_have_the_same_tokens_and_logprobs_within_1e_5(kind, first):
    run(kind, seeds(first, 20), False)
