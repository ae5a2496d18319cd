"""Prompt lookup against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.engine.lookup import PromptLookup
from nonet.types import UserError


def slow(known: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """Try every length from the longest, every place from the latest."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(known) - n - 1, -1, -1):
            if known[start : start + n] == known[len(known) - n :]:
                text = list(known)
                for _ in range(count):
                    text.append(text[start + n])
                    start += 1
                return text[len(known) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 3), st.integers(3, 6))
def test_it_proposes_what_followed_the_longest_latest_match(known, count, shortest, longest):
    found = PromptLookup(9, shortest, longest).after(known, count)
    assert found == slow(known, count, shortest, longest)


def test_a_period_goes_on():
    assert PromptLookup(shortest=2).after([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_found_in_what_was_never_said_before():
    assert PromptLookup(shortest=1).after([1, 2, 3], 4) == []
    assert PromptLookup(shortest=1).after([1], 4) == []
    assert PromptLookup(shortest=2).after([1, 2, 5, 2], 4) == []


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (dict(steps=0), "steps = 0: must be at least 1"),
        (dict(shortest=4, longest=3), "shortest = 4, longest = 3: must be at least 1, and in this order"),
    ],
)
def test_impossible_settings_are_one_sentence(over, sentence):
    with pytest.raises(UserError) as caught:
        PromptLookup(**over)
    assert str(caught.value) == sentence
