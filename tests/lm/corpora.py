"""Corpora small enough for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from nonet.chat import Tokenizer
from nonet.lm import vocabulary
from nonet.lm.corpus import Corpus, build

_TEXT = "the a cat dog bird sat ran flew on under over mat hat tree river house and then because slowly quickly"
WORDS = _TEXT.split()


def sentence(i: int, words: int) -> str:
    """Words of a seeded walk: something to learn, nothing to know by heart."""
    state, out = i * 7919 + 1, []
    for _ in range(words):
        state = (state * 1103515245 + 12345) % 2**31
        out.append(WORDS[(state >> 16) % len(WORDS)])
    return " ".join(out) + "."


def texts(count: int = 60) -> list[str]:
    """Documents of 3 to 80 words."""
    return [sentence(i, 3 + (i * 37) % 78) for i in range(count)]


def write(folder: Path, documents: list[str]) -> Path:
    """One .txt file a document."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, document in enumerate(documents):
        (folder / f"{i:04d}.txt").write_text(document)
    return folder


@cache
def tokenizer() -> Tokenizer:
    return vocabulary.train(texts(), 290, Path(mkdtemp()) / "tokenizer")


@cache
def corpus() -> Corpus:
    folder = Path(mkdtemp())
    return build([str(write(folder / "texts", texts()))], tokenizer(), folder / "cache")
