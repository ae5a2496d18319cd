"""A byte-level BPE for running text, and what pretraining needs to know about any tokenizer.

Words as GPT-2 splits them, digits one by one (llama.cpp knows the pair as "smollm"). Control tokens and chat template
are those of the tokenizers trained for chat tasks, so a pretrained model can be taught to answer as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nonet.chat import Tokenizer
from nonet.chat.training import END, PAD, SPECIAL, TEMPLATE
from nonet.types import UserError

SMALLEST = 256 + len(SPECIAL)


def train(texts: Iterable[str], vocab_size: int, out: Path) -> Tokenizer:
    """Learn merges from texts and write a tokenizer directory; deterministic for the same texts in the same order."""
    if vocab_size < SMALLEST:
        raise UserError(f"vocab = {vocab_size}: the bytes and control tokens alone are {SMALLEST}; give at least that")
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    core.save(str(out / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": PAD, "chat_template": TEMPLATE}
    _write(out / "tokenizer_config.json", {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    ends = {"eos_token_id": core.token_to_id(END), "pad_token_id": core.token_to_id(PAD)}
    _write(out / "generation_config.json", ends)
    return Tokenizer(out)


def _write(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1))


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that closes a document: the tokenizer's EOS."""
    name = tokenizer.config.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    found = None if name is None else tokenizer.core.token_to_id(name)
    if found is None:
        file = tokenizer.directory / "tokenizer_config.json"
        raise UserError(f"{file}: eos_token = {name!r} is no token; name one that closes a document")
    return found


def bytes_of_tokens(tokenizer: Tokenizer) -> list[int]:
    """UTF-8 bytes each id stands for; control tokens stand for none. Only byte-level vocabularies have an answer."""
    decoder = json.loads(tokenizer.core.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise UserError(
            f"{tokenizer.directory}: decoder {decoder.get('type')!r} is not ByteLevel, so bits per byte cannot be "
            "counted; use a byte-level tokenizer (nonet tokenizer train makes one)"
        )
    added = tokenizer.core.get_added_tokens_decoder()
    names = (tokenizer.core.id_to_token(i) for i in range(tokenizer.vocab_size))
    return [
        (0 if added[i].special else len(added[i].content.encode())) if i in added else len(name or "")
        for i, name in enumerate(names)
    ]
