"""The measured distance between the fast and the deterministic mode."""

from __future__ import annotations

from nonet.engine.bound import PROMPTS, WRITTEN, fast_bound
from nonet.model import ModelConfig
from nonet.pipeline.check import fast_mode

TINY = ModelConfig(vocab_size=61, d_model=32, layers=4, heads=2, d_ff=48, kda_head_dim=16)


def test_the_bound_is_small_and_covers_cached_continuations():
    bound = fast_bound(TINY)
    assert bound.same and 0 < bound.worst < 1e-5
    assert bound.tokens == 2 * 2 * len(PROMPTS) * WRITTEN


def test_check_prints_it_or_says_why_not():
    assert fast_mode(TINY).startswith("engine: fast mode within ") and "the same tokens" in fast_mode(TINY)
    large = TINY.model_copy(update={"layers": 200, "d_model": 512, "mixers": ()})
    assert "not measured" in fast_mode(large)
