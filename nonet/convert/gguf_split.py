"""Which of llama.cpp's pre-tokenizers stands for a tokenizer.json's.

GGUF names one of a fixed list; a tokenizer of the same form has its name. Others are still exact under a name that
splits less, if no merge could ever reach across the splits that are missing: then byte-pair encoding of the whole text
is byte-pair encoding of the pieces. The tokenizers trained here are of that kind.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from nonet.convert.gguf_tokenizer import DIGITS, SPLIT
from nonet.types import UserError

WHOLE_TEXT = "superbpe"  # splits around and within runs of digits only
IGNORES_MERGES = {"llama-bpe"}  # llama.cpp takes a word that is a token as it is
NORMALISED = {"qwen2"}
CHARACTER_CLASS = re.compile(r"\[[^\[\]^\\]+\]\+")  # a run of some ASCII characters: where it splits, any context does


class Digit(Enum):
    """Whether a character is one (of any script); a part of a character may leave it open."""

    NO, MAYBE, YES = range(3)


def pre_tokenizer(raw: Mapping[str, Any], merges: Sequence[Sequence[str]], file: Path) -> str:
    """The name under which llama.cpp splits text as tokenizer.json does, or splits it otherwise to the same effect.

    raw: tokenizer.json. merges: its merges as pairs. file: for messages.
    """
    steps, bpe = _steps(raw.get("pre_tokenizer")), raw["model"]
    name = next((name for name, form in _forms().items() if form == steps), None)
    if name is None:
        obstacle = splits_anywhere(steps, merges)
        if obstacle is not None:
            raise UserError(
                f"{file}: pre_tokenizer {_shown(raw.get('pre_tokenizer'))} is none that llama.cpp has ({obstacle}); "
                "name the nearest with --pre, e.g. --pre qwen2, and expect other ids for some texts"
            )
        name = WHOLE_TEXT
    if bool(bpe.get("ignore_merges")) != (name in IGNORES_MERGES):
        raise UserError(
            f"{file}: model.ignore_merges = {bpe.get('ignore_merges')} with pre_tokenizer {name}, which llama.cpp runs "
            f"with {name in IGNORES_MERGES}; name another with --pre"
        )
    normaliser = (raw.get("normalizer") or {}).get("type")
    if normaliser is not None and not (normaliser == "NFC" and name in NORMALISED):
        raise UserError(f"{file}: normalizer {normaliser} is none that llama.cpp applies; retrain without it")
    return name


def _steps(pre: Mapping[str, Any] | None) -> list[tuple[Any, ...]]:
    """The parts of a pre-tokenizer, reduced to what decides where it splits."""
    if pre is None:
        return []
    kind = pre.get("type")
    if kind == "Sequence":
        return [step for part in pre["pretokenizers"] for step in _steps(part)]
    if kind == "Digits":
        return [("Digits", pre.get("individual_digits"))]
    if kind == "ByteLevel":
        return [("ByteLevel", bool(pre.get("add_prefix_space")), pre.get("use_regex", True))]
    if kind == "Split":
        return [("Split", pre["pattern"].get("Regex"), pre.get("behavior"), bool(pre.get("invert")))]
    return [(kind, json.dumps(pre, sort_keys=True))]


def _forms() -> dict[str, list[tuple[Any, ...]]]:
    """The pre-tokenizers that llama.cpp has under a name and Hugging Face tokenizers as these steps."""
    words, bytes_only = ("ByteLevel", False, True), ("ByteLevel", False, False)
    published = {
        pre: [("Split", SPLIT.replace("DIGITS", digits), "Isolated", False), bytes_only]
        for pre, digits in DIGITS.items()
    }
    threes = [("Split", regex, "Isolated", False) for regex in (r"\p{N}+", r"(?=(\d{3})+(?!\d))")]
    return {"gpt-2": [words], "smollm": [("Digits", True), words], WHOLE_TEXT: [*threes, bytes_only], **published}


def splits_anywhere(steps: Sequence[tuple[Any, ...]], merges: Sequence[Sequence[str]]) -> str | None:
    """None if text split as WHOLE_TEXT has the same ids as text split by these steps. Otherwise, why not.

    The steps must decide between two neighbouring characters whatever stands around them: digits one by one, or runs of
    an ASCII class. Then it is enough that no merged token holds two neighbours that one side splits and the other does
    not. Both split between a digit and anything else; digits among themselves only one of the two.
    """
    classes, digits = [], False
    for step in steps:
        if step[0] == "Split" and step[2:] == ("Isolated", False) and _is_class(step[1]):
            classes.append(re.compile(step[1][:-1]))
        elif step == ("Digits", True):
            digits = True
        elif step != ("ByteLevel", False, False):
            return f"its part {step[0]} is unknown"
    for left, right in merges:
        for (a, a_digit), (b, b_digit) in pairwise(_characters(left + right)):
            apart = any(bool(c.fullmatch(a)) != bool(c.fullmatch(b)) for c in classes)
            alike = digits and Digit.YES in (a_digit, b_digit) and Digit.NO in (a_digit, b_digit)  # both sides split
            among = a_digit != Digit.NO and b_digit != Digit.NO
            beside = not digits and (a_digit, b_digit) != (Digit.NO, Digit.NO)
            if (apart or among or beside) and not alike:
                return f"token {left + right!r} reaches across a split"
    return None


def _is_class(regex: str | None) -> bool:
    return regex is not None and regex.isascii() and CHARACTER_CLASS.fullmatch(regex) is not None


def _characters(token: str) -> Iterator[tuple[str, Digit]]:
    """(character, whether it is a digit) for each of a byte-level token; "" where only a part of it is there."""
    data = bytes(_BYTES[c] for c in token)
    start = next((i for i, byte in enumerate(data) if not 0x80 <= byte < 0xC0), len(data))
    if start:
        yield "", Digit.MAYBE if data[:start] in _digit_parts()[1] else Digit.NO
    while start < len(data):
        first = data[start]
        width = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        piece = data[start : start + width]
        if len(piece) < width:
            yield "", Digit.MAYBE if piece in _digit_parts()[0] else Digit.NO
        else:
            text = piece.decode(errors="replace")  # what is no UTF-8 stands in no text
            yield text, Digit.YES if unicodedata.category(text[0]).startswith("N") else Digit.NO
        start += width


@cache
def _digit_parts() -> tuple[set[bytes], set[bytes]]:
    """How the UTF-8 of digits (Unicode's N: digits of all scripts, letters and fractions) may begin, and end."""
    digits = [chr(c).encode() for c in range(0x80, 0x110000) if unicodedata.category(chr(c)).startswith("N")]
    begins = {d[:i] for d in digits for i in range(1, len(d))}
    return begins, {d[i:] for d in digits for i in range(1, len(d))}


def _byte_table() -> dict[str, int]:
    """Character of the byte-level alphabet -> the byte it stands for (printable ones themselves, others from 256)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


_BYTES = _byte_table()


def _shown(pre: Any) -> str:
    text = json.dumps(pre, ensure_ascii=False)
    return text if len(text) < 200 else text[:200] + "..."
