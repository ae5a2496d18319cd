"""Which tokenizers an export accepts, and when whole-text BPE gives the same ids as a tokenizer's own splitting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_k3
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from nonet.chat.training import train
from nonet.convert.gguf_vocab import vocabulary
from nonet.types import UserError

TEXTS = [
    "пример: naïve 1²3 ½٣ 好 ok\n" * 3,
    "move 12 boxes to shelf b7, then sort(abc) 345 times\n" * 3,
    "Hello, World: x2 = 10**3 + (a_b - C4)",
]


def edited(folder: Path, **changes: Any) -> Path:
    """tiny_k3's tokenizer with parts of tokenizer.json replaced; a dotted name reaches into a table."""
    folder.mkdir(exist_ok=True)
    tiny_k3.tokenizer(folder)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    for key, value in changes.items():
        table, _, leaf = key.rpartition("__")
        (raw[table] if table else raw)[leaf] = value
    file.write_text(json.dumps(raw))
    return folder


def said(folder: Path, vocab: int = tiny_k3.VOCAB) -> str:
    with pytest.raises(UserError) as caught:
        vocabulary(folder, vocab)
    return str(caught.value)


# -------------------------------------------------------------- our tokenizers


def test_a_tokenizer_that_we_train_has_a_name_in_llama_cpp(tmp_path: Path):
    train(TEXTS, 400, tmp_path, phrases=["<tool>"])
    out = vocabulary(tmp_path, 500)
    assert out["tokenizer.ggml.pre"] == "superbpe"
    tokens, kinds = out["tokenizer.ggml.tokens"], out["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 500
    assert kinds[tokens.index("<|end|>")] == 3
    assert kinds[tokens.index("<tool>")] == 4
    assert kinds[-1] == 5
    assert out["tokenizer.ggml.eos_token_id"] == tokens.index("<|end|>")
    assert out["tokenizer.ggml.add_bos_token"] is False


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer of ours, and the same with llama.cpp's superbpe splitting in place of its own."""
    folder = tmp_path_factory.mktemp("trained")
    train(TEXTS, 400, folder)
    assert vocabulary(folder, 400)["tokenizer.ggml.pre"] == "superbpe"
    ours, theirs = (Tokenizer.from_file(str(folder / "tokenizer.json")) for _ in range(2))
    digits = [pre_tokenizers.Split(Regex(r), "isolated") for r in (r"\p{N}+", r"(?=(\d{3})+(?!\d))")]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_only])  # pyright: ignore
    return ours, theirs


@given(st.text(alphabet=st.one_of(st.sampled_from("abc 12xyz,\n.SH²٣½é好"), st.characters()), max_size=60))
def test_whole_text_bpe_gives_the_same_ids(both: tuple[Tokenizer, Tokenizer], text: str):
    ours, theirs = both
    assert theirs.encode(text).ids == ours.encode(text).ids


@pytest.mark.parametrize(
    ("merges", "why"),
    [
        ([["²", "a"]], "token '²a' reaches across a split"),  # the end of "ò", say; after "²" both sides split
        ([["1", "2"]], "token '12' reaches across a split"),
        ([["A", "b"]], "token 'Ab' reaches across a split"),
        ([["²", "Â"]], "token '²Â' reaches across a split"),  # the end of one superscript two, the start of the next
    ],
)
def test_a_merge_across_a_split_is_found(merges: list[list[str]], why: str, tmp_path: Path):
    train(TEXTS, 400, tmp_path)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["merges"] += merges
    for left, right in merges:
        raw["model"]["vocab"].setdefault(left + right, len(raw["model"]["vocab"]) + 10)
    file.write_text(json.dumps(raw))
    assert why in said(tmp_path, 1000)
    assert vocabulary(tmp_path, 1000, pre="smollm")["tokenizer.ggml.pre"] == "smollm"


def test_what_both_sides_split_is_no_obstacle(tmp_path: Path):
    train(TEXTS, 400, tmp_path)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["merges"].append(["a", "1"])
    raw["model"]["vocab"]["a1"] = 1000
    file.write_text(json.dumps(raw))
    assert vocabulary(tmp_path, 1001)["tokenizer.ggml.pre"] == "superbpe"


def test_parts_of_characters_are_no_obstacle(tmp_path: Path):
    """A space and the first byte of an accented letter; the last byte of a Cyrillic letter and the first of another."""
    train(["é ö ü ² ½ ٣ 好 пример строка текст " * 50], 420, tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    merged = {"".join(pair) for pair in raw["model"]["merges"]}
    assert "ĠÃ" in merged
    assert any(token[0] in "°±²³´µ¶·¸¹º»¼½¾¿" and token[1] in "ÐÑ" for token in merged if len(token) > 1)
    assert vocabulary(tmp_path, 500)["tokenizer.ggml.pre"] == "superbpe"


# ------------------------------------------------------------------- refusals


def test_the_unchanged_one_passes(tmp_path: Path):
    out = vocabulary(edited(tmp_path), tiny_k3.VOCAB)
    assert out["tokenizer.ggml.pre"] == "smollm"
    assert out["tokenizer.ggml.merges"][:2] == ["a k", "a l"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "with decoder 'WordPiece'"),
        ({"model__byte_fallback": True}, "model.byte_fallback = True"),
        ({"model__merges": []}, "model.merges is empty"),
        ({"model__ignore_merges": True}, "model.ignore_merges = True with pre_tokenizer smollm"),
        ({"normalizer": {"type": "NFC"}}, "normalizer NFC is none that llama.cpp applies"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "its part Whitespace is unknown"),
        ({"added_tokens": [{"id": 0, "content": "<|end|>", "single_word": False, "lstrip": True, "rstrip": False,
                            "normalized": False, "special": True}]}, "'<|end|>' has lstrip = true"),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_do_otherwise(changes: dict, part: str, tmp_path: Path):
    message = said(edited(tmp_path, **changes))
    assert "tokenizer.json" in message
    assert part in message


def test_a_leading_space_is_not_llama_cpps(tmp_path: Path):
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore
    core.decoder = decoders.ByteLevel()  # pyright: ignore
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    assert "its part ByteLevel is unknown" in said(tmp_path, 3)


def test_too_few_embeddings(tmp_path: Path):
    assert "but vocab_size = 100" in said(edited(tmp_path), 100)


def test_no_end(tmp_path: Path):
    edited(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "no EOS token" in said(tmp_path)


def test_several_ends(tmp_path: Path):
    edited(tmp_path)
    ends = tmp_path / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": [5, 0, 7]}))
    out = vocabulary(tmp_path, tiny_k3.VOCAB)
    assert [out[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [5, 0, 7]
    ends.write_text(json.dumps({"eos_token_id": [5, 6, 7, 8]}))
    assert "names 5 ids, GGUF has room for 3" in said(tmp_path)
    ends.write_text(json.dumps({"eos_token_id": 100_000}))
    assert "the eos token has id 100000" in said(tmp_path)


def test_what_stands_around_a_text(tmp_path: Path):
    edited(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 0}))
    core = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = [(tiny_k3.PAD, 1), (tiny_k3.END, 0)]
    for form, bos, eos in (("P $A E", True, True), ("$A E", False, True), ("P $A", True, False)):
        single = form.replace("P", tiny_k3.PAD).replace("E", tiny_k3.END)
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)  # pyright: ignore
        core.save(str(tmp_path / "tokenizer.json"))
        out = vocabulary(tmp_path, tiny_k3.VOCAB)
        assert (out["tokenizer.ggml.add_bos_token"], out["tokenizer.ggml.add_eos_token"]) == (bos, eos)
    single = f"{tiny_k3.END} $A"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)  # pyright: ignore
    core.save(str(tmp_path / "tokenizer.json"))
    assert "puts ids [0] around a text" in said(tmp_path)
