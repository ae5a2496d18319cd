"""Philox against Random123's published vectors, and the properties the sampler counts on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.ops.rng import philox, stream_key, uniforms

# kat_vectors of the Random123 distribution, philox4x32-10: counter, key, result.
KNOWN = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


def words(text: str) -> np.ndarray:
    return np.array([int(w, 16) for w in text.split()], np.uint64)


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    counter, key, result = map(words, KNOWN[name])
    assert philox(counter, key).tolist() == result.tolist()


def test_rows_are_independent_of_each_other():
    counters, keys, results = (np.stack([words(k[i]) for k in KNOWN.values()]) for i in range(3))
    assert philox(counters, keys).tolist() == results.tolist()


@given(seed=st.integers(0, 2**63), position=st.integers(0, 2**32 - 1), purpose=st.integers(0, 2**32 - 1))
def test_a_draw_is_a_pure_function_in_the_unit_interval(seed, position, purpose):
    key = np.array([stream_key(seed, "s")], np.uint64)
    alone = uniforms(key, np.array([position], np.uint64), purpose)[0]
    crowd = uniforms(np.repeat(key, 3, 0), np.array([1, position, 2], np.uint64), purpose)[1]
    assert alone == crowd
    assert 0 <= alone < 1


def test_seed_stream_position_and_purpose_each_matter():
    def draw(seed: int = 0, stream: str = "a", position: int = 5, purpose: int = 0) -> float:
        return uniforms(np.array([stream_key(seed, stream)], np.uint64), np.array([position], np.uint64), purpose)[0]

    others = [draw(seed=1), draw(stream="b"), draw(position=6), draw(purpose=1)]
    assert len({draw(), *others}) == 5
    assert stream_key(1, "2/a") != stream_key(12, "a")


def test_53_bits_are_used():
    """Scaled by 2^53 every draw is an integer, and the low bits are not always zero."""
    draws = uniforms(np.array([stream_key(0, str(i)) for i in range(64)], np.uint64), np.zeros(64, np.uint64))
    scaled = draws * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert len({int(s) % 16 for s in scaled}) > 8


def test_draws_are_uniform_over_positions_and_over_streams():
    """Chi-square over 64 bins of 64,000 draws: 63 degrees of freedom, 0.999 quantile 103.4."""
    n, bins = 64_000, 64
    along = uniforms(np.repeat(np.array([stream_key(3, "s")], np.uint64), n, 0), np.arange(n, dtype=np.uint64))
    across = uniforms(np.array([stream_key(3, str(i)) for i in range(n)], np.uint64), np.full(n, 9, np.uint64))
    for draws in (along, across):
        counts = np.bincount((draws * bins).astype(int), minlength=bins)
        assert ((counts - n / bins) ** 2 / (n / bins)).sum() < 103.4
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.02
