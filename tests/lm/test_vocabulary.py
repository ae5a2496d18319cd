"""The tokenizer that pretraining trains: lossless, deterministic, and ready for chat."""

from __future__ import annotations

import json

import corpora
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.chat import Tokenizer
from nonet.lm import vocabulary
from nonet.types import UserError


@given(st.text(max_size=60))
def test_any_text_survives(text):
    t = corpora.tokenizer()
    assert t.decode(t.encode_literal(text)) == text


@given(st.text(max_size=60))
def test_bytes_of_tokens_add_up_to_the_text(text):
    t = corpora.tokenizer()
    size = vocabulary.bytes_of_tokens(t)
    assert len(size) == t.vocab_size
    assert sum(size[i] for i in t.encode_literal(text)) == len(text.encode())


def test_control_tokens_stand_for_no_bytes_and_added_words_for_theirs(tmp_path):
    t = corpora.tokenizer()
    assert vocabulary.bytes_of_tokens(t)[vocabulary.end_of_text(t)] == 0
    t = vocabulary.train(corpora.texts(), 290, tmp_path)
    t.core.add_tokens(["na\u00efve"])
    assert vocabulary.bytes_of_tokens(t)[-1] == 6


def test_the_vocabulary_has_the_size_asked_for_and_learns_words(tmp_path):
    t = vocabulary.train(corpora.texts(), 320, tmp_path / "a")
    assert t.vocab_size == 320
    assert len(t.encode(" cat")) == 1
    assert t.encode("1234") != t.encode("12") and len(t.encode("1234")) == 4  # digit by digit
    again = vocabulary.train(corpora.texts(), 320, tmp_path / "b")
    assert again.core.to_str() == t.core.to_str()


def test_it_can_hold_a_conversation():
    t = Tokenizer(corpora.tokenizer().directory)
    ids = t.prompt([{"role": "user", "content": "the cat"}])
    assert t.decode(ids) == "<|user|>the cat<|end|><|assistant|>"
    assert vocabulary.end_of_text(t) in t.stop_ids


def test_too_small_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocab = 100: the bytes and control tokens alone are"):
        vocabulary.train([], 100, tmp_path)


def test_a_tokenizer_without_an_end_or_without_bytes_is_refused(tmp_path):
    vocabulary.train(corpora.texts(), 290, tmp_path)
    core = json.loads((tmp_path / "tokenizer.json").read_text())
    core["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    with pytest.raises(UserError, match="'WordPiece' is not ByteLevel"):
        vocabulary.bytes_of_tokens(Tokenizer(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(UserError, match="eos_token = '</s>' is no token"):
        vocabulary.end_of_text(Tokenizer(tmp_path))
