"""A tokenised corpus on disk: made once, then mapped into memory.

    NAME/tokens.bin      all documents end to end, each closed by the tokenizer's EOS; uint16, or uint32 above 65,536
    NAME/documents.bin   per document: end in tokens.bin (int64), bytes of text (int64), hash of the text (uint64)
    NAME/meta.json       written last: a directory that has it is whole
    NAME/progress.json   while it is being made: how far, so that a killed run continues

NAME is a hash of the tokenizer and of every file's content: other data or another tokenizer is another corpus, and the
same is found again. Whether a document is held out depends on nothing but the hash of its text, so duplicates fall on
the same side and adding data moves nothing across.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nonet.chat import Tokenizer
from nonet.lm import text
from nonet.lm.vocabulary import end_of_text
from nonet.progress import progress
from nonet.run import write_atomic
from nonet.types import UserError

RECORD = np.dtype([("end", "<i8"), ("bytes", "<i8"), ("hash", "<u8")])
FORMAT = 1
_TOGETHER = 256  # documents tokenised in one call, which uses all cores
_SAVE_EVERY_S = 10.0


@dataclass(frozen=True)
class Corpus:
    """tokens_N and documents_M are memory maps."""

    folder: Path
    tokens_N: np.ndarray
    documents_M: np.ndarray

    @staticmethod
    def open(folder: Path) -> Corpus:
        meta = json.loads((folder / "meta.json").read_text())
        tokens_N = np.memmap(folder / "tokens.bin", meta["dtype"], "r", shape=(meta["tokens"],))
        documents_M = np.memmap(folder / "documents.bin", RECORD, "r", shape=(meta["documents"],))
        return Corpus(folder, tokens_N, documents_M)

    @cached_property
    def starts_M(self) -> np.ndarray:
        return np.concatenate([[0], self.documents_M["end"][:-1]])

    @cached_property
    def lengths_M(self) -> np.ndarray:
        return self.documents_M["end"] - self.starts_M

    def divided(self, heldout: float) -> tuple[np.ndarray, np.ndarray]:
        """(training, held-out) document indices; held-out ones in the order of their hashes."""
        hash_M = self.documents_M["hash"]
        out_M = is_heldout(hash_M, heldout)
        held = np.flatnonzero(out_M)
        return np.flatnonzero(~out_M), held[np.argsort(hash_M[held], kind="stable")]


def is_heldout(hash_M: np.ndarray, share: float) -> np.ndarray:
    return hash_M < np.uint64(int(share * 2**63) * 2)


def text_hash(document: str) -> int:
    return int.from_bytes(blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


# ---------------------------------------------------------------------------------- making one


def build(sources: Sequence[str], tokenizer: Tokenizer, cache: Path) -> Corpus:
    """The corpus of these sources under `cache`, from there if it is whole, continued if it is half made; of several
    processes that want it at once, one makes it and the others wait.
    """
    files = text.files(sources)
    folder = cache / corpus_name(files, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system when a process dies
        if not (folder / "meta.json").exists():
            _Maker(folder, files, tokenizer).make()
    return Corpus.open(folder)


def corpus_name(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    digest = blake2b(f"{FORMAT} {end_of_text(tokenizer)} ".encode(), digest_size=8)
    digest.update(tokenizer.core.to_str().encode())
    for file in files:
        digest.update(f"{file.suffix} {file.stat().st_size} ".encode())
        with file.open("rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


class _Maker:
    """Appends documents in order; `progress.json` always names a state that both files contain."""

    def __init__(self, folder: Path, files: Sequence[Path], tokenizer: Tokenizer):
        self.folder, self.files, self.tokenizer = folder, files, tokenizer
        self.eos = end_of_text(tokenizer)
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        # the next document to read (its file, its place there), and what has been written
        self.at = {"file": 0, "document": 0, "tokens": 0, "documents": 0}

    def make(self) -> None:
        found = self.folder / "progress.json"
        if found.exists():
            self.at = json.loads(found.read_text())
        read_MB = np.cumsum([0, *(f.stat().st_size / 1e6 for f in self.files)]).tolist()
        written = {"tokens.bin": self.at["tokens"] * self.dtype.itemsize}
        written["documents.bin"] = self.at["documents"] * RECORD.itemsize
        with (
            _opened(self.folder / "tokens.bin", written["tokens.bin"]) as tokens,
            _opened(self.folder / "documents.bin", written["documents.bin"]) as records,
            progress("corpus: megabytes", round(read_MB[-1]), round(read_MB[self.at["file"]])) as bar,
        ):
            saved = time.monotonic()
            for batch in self._batches():
                self._append([document for _, _, document in batch], tokens, records)
                file, document, _ = batch[-1]
                self.at |= {"file": file, "document": document + 1}
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    self._save(tokens, records)
                    saved = time.monotonic()
                bar(round(read_MB[file]), f"{self.at['tokens']:,} tokens")
            self._save(tokens, records)
            bar(round(read_MB[-1]), f"{self.at['tokens']:,} tokens")
        self._finish()

    def _batches(self) -> Iterator[list[tuple[int, int, str]]]:
        """(file, place in it, text) of the documents not written yet, many at a time."""
        rest = self._rest()
        while batch := list(islice(rest, _TOGETHER)):
            yield batch

    def _rest(self) -> Iterator[tuple[int, int, str]]:
        first, skip = self.at["file"], self.at["document"]
        for i in range(first, len(self.files)):
            for j, document in enumerate(text.documents(self.files[i])):
                if i > first or j >= skip:
                    yield i, j, document

    def _append(self, batch: list[str], tokens: BinaryIO, records: BinaryIO) -> None:
        core = self.tokenizer.core
        core.encode_special_tokens = True  # a control token spelled in a text is text
        try:
            encoded = core.encode_batch_fast(batch, add_special_tokens=False)
        finally:
            core.encode_special_tokens = False
        for document, e in zip(batch, encoded, strict=True):
            if not e.ids:
                continue
            tokens.write(np.array([*e.ids, self.eos], self.dtype).tobytes())
            self.at["tokens"] += len(e.ids) + 1
            self.at["documents"] += 1
            size = len(document.encode("utf-8", "surrogatepass"))
            records.write(np.array([(self.at["tokens"], size, text_hash(document))], RECORD).tobytes())

    def _save(self, tokens: BinaryIO, records: BinaryIO) -> None:
        for f in (tokens, records):
            f.flush()
            os.fsync(f.fileno())
        write_atomic(self.folder / "progress.json", json.dumps(self.at))

    def _finish(self) -> None:
        if not self.at["documents"]:
            raise UserError(f"data: {len(self.files)} files hold no text; give files with documents in them")
        meta: dict[str, Any] = {"format": FORMAT, "dtype": self.dtype.str}
        meta |= {"tokens": self.at["tokens"], "documents": self.at["documents"]}
        write_atomic(self.folder / "meta.json", json.dumps(meta, indent=1))


def _opened(file: Path, size: int) -> BinaryIO:
    """Open for appending, cut back to what the last saved progress knows of."""
    if size and (not file.exists() or file.stat().st_size < size):
        raise UserError(f"{file}: shorter than its progress.json says; delete {file.parent} to start over")
    f = file.open("ab")
    f.truncate(size)
    return f
