"""What the context experiment is trained and measured on: recall of pairs hidden in real text.

A row is text of the Python standard library with `pairs` two-token needles (a key, its value) put in at random places,
and at its end every key again, in another order, each followed by its value: to predict those last values a model has
to remember pairs over everything between. Keys and values have token ids of their own, so nothing in the text helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nonet.chat import Tokenizer
from nonet.lm import vocabulary
from nonet.lm.corpus import Corpus, build
from nonet.lm.trainer import Row
from nonet.pipeline.pretraining import training_texts

KEYS = VALUES = 24
TEXT_VOCAB, HELD_OUT = 512, 0.05
MOST_PAIRS = 16  # in training, from none up; many answers a row are what makes tiny models learn to look up at all
TEXT_SHARE = 0.1  # of text tokens that carry loss in training; the answers all do


@dataclass(frozen=True)
class RecallText:
    """Rows are pure functions of (split, length, seed, index)."""

    corpus: Corpus
    text_ids: int

    @staticmethod
    def made(folder: Path) -> RecallText:
        """Tokenizer and corpus under `folder`, made once."""
        if not (folder / "tokenizer" / "generation_config.json").exists():
            vocabulary.train(training_texts(["stdlib"], HELD_OUT, 4_000_000), TEXT_VOCAB, folder / "tokenizer")
        tokenizer = Tokenizer(folder / "tokenizer")
        return RecallText(build(["stdlib"], tokenizer, folder / "corpus"), tokenizer.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.text_ids + KEYS + VALUES

    @cached_property
    def splits(self) -> dict[str, np.ndarray]:
        training, held = self.corpus.divided(HELD_OUT)
        return {"train": training, "heldout": held}

    def text(self, split: str, length: int, draw: np.random.Generator) -> np.ndarray:
        """A window of one document; documents in proportion to how many windows they have."""
        documents = self.splits[split]
        windows = np.maximum(0, self.corpus.lengths_M[documents] - length + 1).cumsum()
        at = int(draw.integers(windows[-1]))
        i = int(np.searchsorted(windows, at, "right"))
        start = int(self.corpus.starts_M[documents[i]]) + at - (int(windows[i - 1]) if i else 0)
        return self.corpus.tokens_N[start : start + length].astype(np.int64)

    def recall(self, split: str, length: int, pairs: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [length], True on the answers [length])."""
        text = self.text(split, length - 4 * pairs, draw)
        keys = self.text_ids + draw.choice(KEYS, pairs, replace=False)
        values = self.text_ids + KEYS + draw.integers(VALUES, size=pairs)
        places = np.sort(draw.integers(len(text) + 1, size=pairs)).repeat(2)
        filled = np.insert(text, places, np.stack([keys, values], 1).ravel())
        order = draw.permutation(pairs)
        asked = np.stack([keys[order], values[order]], 1).ravel()
        answers = np.zeros(length, bool)
        answers[length - 2 * pairs + 1 :: 2] = True
        return np.concatenate([filled, asked]), answers

    def training_rows(self, length: int, seed: int, first: int, count: int) -> list[Row]:
        return [self._training_row(length, seed, i) for i in range(first, first + count)]

    def _training_row(self, length: int, seed: int, index: int) -> Row:
        draw = generator("train", length, seed, index)
        tokens, answers = self.recall("train", length, int(draw.integers(min(MOST_PAIRS, length // 4) + 1)), draw)
        mask = answers | ((tokens < self.text_ids) & (draw.random(length) < TEXT_SHARE))
        return Row(tokens.tolist(), mask.tolist())

    def test_rows(self, length: int, pairs: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """([count, length] tokens, answers) from held-out text; the same for every model."""
        rows = [self.recall("heldout", length, pairs, generator("heldout", length, pairs, i)) for i in range(count)]
        return np.stack([t for t, _ in rows]), np.stack([a for _, a in rows])

    def test_text(self, length: int, count: int) -> np.ndarray:
        return np.stack([self.text("heldout", length, generator("text", length, 0, i)) for i in range(count)])


def generator(purpose: str, *numbers: int) -> np.random.Generator:
    """A stream of its own for every purpose and numbers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([*purpose.encode(), *numbers])))


def shuffled_windows(tokens_BT: np.ndarray, window: int, kept: int, seed: int) -> np.ndarray:
    """The rows with tokens shuffled inside windows of `window` before the last `kept`, which stay as they are."""
    out = tokens_BT.copy()
    for row, tokens in enumerate(out):
        draw = generator("shuffle", window, seed, row)
        for a in range(0, len(tokens) - kept, window):
            draw.shuffle(tokens[a : min(a + window, len(tokens) - kept)])
    return out


def in_batches(rows: np.ndarray, tokens: int) -> Sequence[np.ndarray]:
    """Rows in groups of at most `tokens` tokens, at least one row each."""
    size = max(1, tokens // rows.shape[1])
    return [rows[i : i + size] for i in range(0, len(rows), size)]
