"""The vocabulary inside a GGUF file as tokenizer.json, tokenizer_config.json and generation_config.json.

Owns: pre-tokenizers by name, special tokens, begin and end tokens, the chat template.
Invariant: text becomes the ids the model was trained on; nothing is guessed from the vocabulary's looks.
Refuses, naming file and key: tokenizer models and pre-tokenizers it does not know.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from nonet.convert.gguf_reader import GGUFFile
from nonet.types import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type

# The published splitting expressions: letters with one leading mark, digits in ones (Qwen) or threes (Llama 3).
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """A byte-level BPE tokenizer from the file's metadata."""
    model, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UserError(f"{file.path}: tokenizer.ggml.model = {model!r} is not implemented; only 'gpt2' (BPE) is")
    tokens, kinds = _vocabulary(file)
    merges = [tuple(m.split(" ", 1)) for m in file.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    for pair in merges:
        if len(pair) != 2 or not all(piece in vocab for piece in (*pair, "".join(pair))):
            raise UserError(f"{file.path}: tokenizer.ggml.merges holds {' '.join(pair)!r}, which the vocabulary lacks")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))  # pyright: ignore[reportArgumentType]
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)  # pyright: ignore[reportAttributeAccessIssue]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = _post_processor(file, tokens)  # pyright: ignore[reportAttributeAccessIssue]
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False)])
    return tokenizer


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens, kinds = file.get("tokenizer.ggml.tokens", []), file.get("tokenizer.ggml.token_type")
    kinds = [NORMAL] * len(tokens) if kinds is None else kinds
    if len(tokens) > file.config.vocab_size or len(kinds) != len(tokens):
        raise UserError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries and token_type {len(kinds)} for "
            f"{file.config.vocab_size} embeddings; use a complete GGUF file"
        )
    for token, count in Counter(tokens).items():
        if count > 1:
            raise UserError(f"{file.path}: tokenizer.ggml.tokens holds {token!r} {count} times; use another GGUF file")
    odd = next((k for k in kinds if k not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED)), None)
    if odd is not None:
        raise UserError(f"{file.path}: tokenizer.ggml.token_type = {odd} is not implemented for BPE; only 1 to 5 are")
    return tokens, kinds


def _pre_tokenizer(file: GGUFFile, pre: str | None) -> pre_tokenizers.PreTokenizer:
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", False))
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)]
    elif pre == "gpt-2":
        split = [pre_tokenizers.ByteLevel(add_prefix_space=prefix)]
    elif pre == "superbpe":
        regexes = [Regex(r"\p{N}+"), Regex(r"(?=(\d{3})+(?!\d))")]  # digits apart, in threes from the right
        split = [
            *(pre_tokenizers.Split(regex, behavior="isolated") for regex in regexes),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    elif pre in DIGITS:
        regex = Regex(SPLIT.replace("DIGITS", DIGITS[pre]))
        split = [
            pre_tokenizers.Split(regex, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    else:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r} is not implemented; only gpt-2, superbpe, smollm, "
            f"{', '.join(DIGITS)} are"
        )
    return pre_tokenizers.Sequence(split)  # pyright: ignore[reportArgumentType]


def _adds(file: GGUFFile) -> tuple[bool, bool]:
    """Whether a text begins with bos and ends with eos; unsaid, llama-bpe begins with bos and others do not."""
    by_default = file.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = file.get("tokenizer.ggml.add_bos_token", by_default)
    return bool(bos), bool(file.get("tokenizer.ggml.add_eos_token", False))


def _post_processor(file: GGUFFile, tokens: list[str]) -> processors.PostProcessor:
    plain = processors.ByteLevel(trim_offsets=False)
    ends = [
        special_id(file, name, tokens, required=True) if add else None
        for name, add in zip(("bos", "eos"), _adds(file), strict=True)
    ]
    if ends == [None, None]:
        return plain
    bos, eos = ([] if i is None else [tokens[i]] for i in ends)
    template = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{t}:1" for t in bos), "$B:1", *(f"{t}:1" for t in eos)],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(ends) if i is not None],
    )
    return processors.Sequence([plain, template])  # pyright: ignore[reportArgumentType]


def special_id(file: GGUFFile, name: str, tokens: list[str], required: bool = False) -> int | None:
    """The id metadata gives bos, eos, eot, eom, unknown or padding; None if it gives none."""
    value = file.get(f"tokenizer.ggml.{name}_token_id")
    if value is None and required:
        raise UserError(f"{file.path}: tokenizer.ggml.{name}_token_id is missing although add_{name}_token is set")
    if value is not None and not 0 <= value < len(tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.{name}_token_id = {value} is not one of {len(tokens)} tokens")
    return value


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """bos, eos and pad ids under config.json's names; end-of-turn and end-of-message ids join eos."""
    tokens = file.get("tokenizer.ggml.tokens", [])
    bos, eos, eot, eom, pad = (special_id(file, name, tokens) for name in ("bos", "eos", "eot", "eom", "padding"))
    ends = [i for i in dict.fromkeys((eos, eot, eom)) if i is not None]
    ids = {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else eos, "pad_token_id": pad}
    return {key: value for key, value in ids.items() if value is not None}


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by text, and the chat template word for word."""
    tokens = file.get("tokenizer.ggml.tokens", [])
    add_bos, add_eos = _adds(file)
    out: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.config.max_position,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (i := special_id(file, name, tokens)) is not None:
            out[f"{key}_token"] = tokens[i]
    if template := file.get("tokenizer.chat_template"):
        out["chat_template"] = template
    return out
