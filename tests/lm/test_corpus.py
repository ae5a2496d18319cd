"""The tokenised corpus: faithful, found again, continued after a crash, and divided by nothing but the text."""

from __future__ import annotations

import json
from pathlib import Path

import corpora
import numpy as np
import pytest

from nonet.lm import corpus as room
from nonet.lm import vocabulary
from nonet.lm.corpus import Corpus, build, is_heldout, text_hash
from nonet.types import UserError


def made(folder: Path, documents: list[str], name: str = "texts") -> Corpus:
    return build([str(corpora.write(folder / name, documents))], corpora.tokenizer(), folder / "cache")


def words(c: Corpus) -> list[list[int]]:
    return [c.tokens_N[a : a + n].tolist() for a, n in zip(c.starts_M, c.lengths_M, strict=True)]


def test_documents_are_their_tokens_closed_by_the_end(tmp_path):
    t = corpora.tokenizer()
    documents = ["the cat", "caf\u00e9 \u2615", "a dog ran"]
    c = made(tmp_path, documents)
    end = vocabulary.end_of_text(t)
    assert words(c) == [[*t.encode_literal(d), end] for d in documents]
    assert c.documents_M["bytes"].tolist() == [7, 9, 9]
    assert c.tokens_N.dtype == np.uint16
    assert [t.decode(w[:-1]) for w in words(c)] == documents


def test_a_control_token_spelled_in_a_text_is_text(tmp_path):
    [ids] = words(made(tmp_path, ["before <|end|> after"]))
    assert ids.count(vocabulary.end_of_text(corpora.tokenizer())) == 1


def test_empty_documents_are_not_documents(tmp_path):
    assert len(made(tmp_path, ["the", "", "cat"]).documents_M) == 2
    with pytest.raises(UserError, match="1 files hold no text"):
        made(tmp_path, [""], "nothing")


def test_the_same_data_is_found_again_and_other_data_is_another(tmp_path, monkeypatch):
    first = made(tmp_path, corpora.texts(9))
    monkeypatch.setattr(room._Maker, "make", lambda self: pytest.fail("made again"))
    assert made(tmp_path, corpora.texts(9), "copy").folder == first.folder
    monkeypatch.undo()
    assert made(tmp_path, [*corpora.texts(8), "other"], "other").folder != first.folder
    wider = vocabulary.train(corpora.texts(), 300, tmp_path / "wider")
    assert room.corpus_name([tmp_path / "texts" / "0000.txt"], wider) != room.corpus_name(
        [tmp_path / "texts" / "0000.txt"], corpora.tokenizer()
    )


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_killed_while_being_made_it_continues_to_the_same_bytes(tmp_path, monkeypatch, stop):
    """Stopped after `stop` batches; what was written after the last saved progress is cut away."""
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in corpora.texts(40)))
    more = corpora.write(tmp_path / "more", corpora.texts(7))
    sources = [str(lines), str(more)]
    monkeypatch.setattr(room, "_TOGETHER", 9)
    whole = build(sources, corpora.tokenizer(), tmp_path / "whole")

    real, count = room._Maker._append, iter(range(100))

    def interrupted(self, *args):
        real(self, *args)
        if next(count) == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(room, "_SAVE_EVERY_S", 0)
    monkeypatch.setattr(room._Maker, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(sources, corpora.tokenizer(), tmp_path / "cut")
    monkeypatch.setattr(room._Maker, "_append", real)
    at = json.loads(next((tmp_path / "cut").glob("*/progress.json")).read_text())
    assert at["documents"] == 9 * stop
    again = build(sources, corpora.tokenizer(), tmp_path / "cut")
    for name in ("tokens.bin", "documents.bin", "meta.json"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_files_shorter_than_their_progress_are_refused(tmp_path):
    c = made(tmp_path, corpora.texts(9))
    (c.folder / "meta.json").unlink()
    (c.folder / "tokens.bin").write_bytes(b"")
    with pytest.raises(UserError, match="shorter than its progress"):
        made(tmp_path, corpora.texts(9))


def test_a_large_vocabulary_takes_four_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(type(corpora.tokenizer()), "vocab_size", 1 << 17)
    c = made(tmp_path, ["the cat"])
    assert c.tokens_N.dtype == np.uint32
    assert words(c)[0][:-1] == corpora.tokenizer().encode("the cat")


def test_what_is_held_out_hangs_on_the_text_alone(tmp_path):
    small, large = made(tmp_path, corpora.texts(30)), made(tmp_path, [*corpora.texts(60), *corpora.texts(30)], "more")
    sides = []
    for c in (small, large):
        training, held = c.divided(0.3)
        assert sorted([*training, *held]) == list(range(len(c.documents_M)))
        sides.append(({int(c.documents_M["hash"][d]) for d in held}, {int(c.documents_M["hash"][d]) for d in training}))
    assert sides[0][0] <= sides[1][0] and sides[0][1] <= sides[1][1]
    assert not sides[1][0] & sides[1][1]  # a duplicate is on its original's side
    assert 10 <= len(large.divided(0.3)[1]) <= 45


def test_the_share_held_out_is_the_share_asked_for():
    hashes = np.array([text_hash(str(i)) for i in range(20000)], np.uint64)
    for share in (0.01, 0.2, 0.7):
        assert is_heldout(hashes, share).mean() == pytest.approx(share, abs=0.01)
    assert not is_heldout(hashes, 0.0).any()
