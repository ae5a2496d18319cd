"""Law 3: cache on == cache off, token for token, whatever is split, branched, preempted, evicted, paused or swapped."""

from __future__ import annotations

import pytest
from engine_programs import checked


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_deterministic_programs_are_bitwise_what_requests_alone_write(first):
    checked("hybrid", first, 20, True)


@pytest.mark.parametrize(("kind", "first"), [*(("hybrid", n) for n in range(60, 140, 20)), ("gqa", 140), ("k3", 160),
                                             ("kimi_linear", 180)])  # fmt: skip
def test_fast_programs_have_the_same_tokens_and_logprobs_within_1e_5(kind, first):
    checked(kind, first, 20, False)
