"""Streamed text is the whole text, cut where it is certain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nonet.chat import StopTexts, TextStream


def joined(stream: TextStream | StopTexts, pieces: list) -> str:
    return "".join(stream.feed(p) for p in pieces) + stream.feed(pieces[0][:0] if pieces else "", last=True)


@given(st.text(max_size=60))
def test_pieces_of_text_join_to_the_text(nano, text):
    stream = TextStream(nano.decode)
    assert "".join(stream.feed([i]) for i in nano.encode_literal(text)) == text


@given(st.lists(st.integers(6, 261), max_size=80))
def test_pieces_join_to_the_whole_even_where_bytes_are_no_text(nano, ids):
    """Any bytes at all: a stray one stays a replacement character, a split character waits for its rest."""
    stream = TextStream(nano.decode)
    pieces = [stream.feed([i]) for i in ids]
    assert "".join(pieces) + stream.feed([], last=True) == nano.decode(ids)


def test_half_a_character_is_not_shown(nano):
    stream = TextStream(nano.decode)
    shown = [stream.feed([i]) for i in nano.encode_literal("é")]
    assert shown == ["", "é"]


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_text_however_it_is_cut(pieces, stops):
    whole = "".join(pieces)
    at = [i for i in (whole.find(s) for s in stops) if i >= 0]
    stream = StopTexts(stops)
    shown = "".join(stream.feed(p) for p in pieces)
    # A stop text that begins earlier but ends later is not there yet when another has already ended the text.
    first = min((whole.find(s) + len(s) for s in stops if s in whole), default=None)
    out = shown + stream.feed("", last=True)
    assert stream.found == (first is not None)
    assert whole.startswith(out)
    assert len(out) >= min(at) if at else out == whole


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4))
def test_nothing_of_a_stop_text_is_ever_shown(text, stop):
    stream = StopTexts([stop])
    out = "".join(stream.feed(c) for c in text) + stream.feed("", last=True)
    assert out == text.partition(stop)[0]
