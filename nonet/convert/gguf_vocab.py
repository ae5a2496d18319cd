"""A directory's tokenizer as GGUF metadata: what gguf_tokenizer.py reads, written.

Owns: token types, special ids and the chat template; gguf_split.py finds the pre-tokenizer.
Invariant: llama.cpp makes the ids that tokenizer.json makes. (llama.cpp does not bring text into NFC, as Qwen's
tokenizer does first; and where two added tokens overlap in a text it takes the longer, not the earlier.)
Refuses: tokenizers that are not byte-level BPE, and any step before or after BPE that llama.cpp would not take.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet.chat import Tokenizer
from nonet.convert.gguf_split import pre_tokenizer
from nonet.convert.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED
from nonet.model.hf_config import read_json
from nonet.types import UserError

NAMES = ("bos", "eos", "unk", "pad")
GGUF_NAME = {"unk": "unknown", "pad": "padding"}


def vocabulary(directory: Path, vocab_size: int, pre: str = "") -> dict[str, Any]:
    """The `tokenizer.*` metadata of a model with `vocab_size` embeddings. pre: instead of the pre-tokenizer found."""
    tokenizer = Tokenizer(directory)
    raw = read_json(directory / "tokenizer.json")
    merges = _merges(raw, directory)
    tokens, kinds = _tokens(tokenizer, raw, vocab_size)
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre or pre_tokenizer(raw, merges, directory / "tokenizer.json"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        **_special(tokenizer, vocab_size),
    }
    if tokenizer.template:
        out["tokenizer.chat_template"] = tokenizer.template
    return out


def _merges(raw: Mapping[str, Any], directory: Path) -> list[tuple[str, ...]]:
    """The merges of a plain byte-level BPE, as pairs."""
    file, model = directory / "tokenizer.json", raw.get("model") or {}
    decoder = (raw.get("decoder") or {}).get("type")
    if model.get("type") != "BPE" or decoder != "ByteLevel":
        raise UserError(
            f"{file}: model.type = {model.get('type')!r} with decoder {decoder!r} is not implemented for GGUF; only "
            "byte-level BPE is"
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise UserError(f"{file}: model.{key} = {model[key]!r} has no place in GGUF; use a plain byte-level BPE")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model.get("merges", [])]
    if not merges:
        raise UserError(f"{file}: model.merges is empty, and llama.cpp loads no BPE without; train the tokenizer")
    for pair in merges:
        if len(pair) != 2 or any(" " in piece for piece in pair):
            raise UserError(f"{file}: model.merges holds {pair!r}, which GGUF cannot write as two words")
    return merges


# -------------------------------------------------------------------- tokens


def _tokens(tokenizer: Tokenizer, raw: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; ids that no token has become unused ones, as the embedding has rows for them."""
    file = tokenizer.directory / "tokenizer.json"
    by_id = {i: token for token, i in tokenizer.core.get_vocab(with_added_tokens=True).items()}
    added = {token["id"]: token for token in raw.get("added_tokens", [])}
    beyond = [i for i in by_id if i >= vocab_size]
    if beyond:
        raise UserError(f"{file}: holds token {by_id[beyond[0]]!r} with id {beyond[0]}, but vocab_size = {vocab_size}")
    for token in added.values():
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise UserError(f"{file}: added token {token['content']!r} has {flag} = true, which GGUF cannot say")
    tokens, kinds = [], []
    for i in range(vocab_size):
        tokens.append(by_id.get(i, f"[PAD{i}]"))
        special = CONTROL if added.get(i, {}).get("special") else USER_DEFINED
        kinds.append(UNUSED if i not in by_id else special if i in added else NORMAL)
    twice = next((t for i, t in enumerate(tokens) if i not in by_id and t in by_id.values()), None)
    if twice is not None:
        raise UserError(f"{file}: token {twice!r} has the name that GGUF gives an unused id; rename it")
    return tokens, kinds


def _special(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """bos, eos, unk and pad ids, and whether a text begins with bos and ends with eos."""
    ids = {name: _id(tokenizer, name) for name in NAMES}
    ends = ids["eos"]
    where = tokenizer.directory
    if not ends:
        raise UserError(f"{where}: no EOS token, and llama.cpp would take id 11; name one in tokenizer_config.json")
    if len(ends) > 3:
        raise UserError(f"{where}: eos_token_id = {ends} names {len(ends)} ids, GGUF has room for 3; keep those in use")
    named = {GGUF_NAME.get(name, name): found[0] for name, found in ids.items() if found}
    named |= dict(zip(("eot", "eom"), ends[1:], strict=False))
    for name, i in named.items():
        if not 0 <= i < vocab_size:
            raise UserError(f"{where}: the {name} token has id {i}, which is none of {vocab_size}; correct the config")
    out: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()}
    before, after = _around(tokenizer)
    for name, found in (("bos", before), ("eos", after)):
        if found not in ([], ids[name][:1]):
            raise UserError(
                f"{where}/tokenizer.json: post_processor puts ids {found} around a text, which GGUF cannot say; "
                f"it may put {name} = {ids[name]} there or nothing"
            )
        out[f"tokenizer.ggml.add_{name}_token"] = bool(found)
    return out


def _id(tokenizer: Tokenizer, name: str) -> list[int]:
    """The ids the directory gives a special token, in the order generation_config, config, tokenizer_config."""
    found: list[int] = []
    file = tokenizer.directory / "config.json"
    config = read_json(file) if file.exists() else {}
    for table in (tokenizer.generation, config, config.get("text_config") or {}):
        value = table.get(f"{name}_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    text = tokenizer.config.get(f"{name}_token")
    text = text.get("content") if isinstance(text, Mapping) else text
    if text is not None and (i := tokenizer.core.token_to_id(text)) is not None:
        found.append(i)
    return list(dict.fromkeys(found)) if name == "eos" else found[:1]


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids put before and after a text."""
    text = next(t for t in ("a", "e", " ", "0", "") if not t or tokenizer.encode(t))
    plain, full = tokenizer.encode(text), tokenizer.core.encode(text, add_special_tokens=True).ids
    start = next((i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain), len(full))
    return full[:start], full[start + len(plain) :]
