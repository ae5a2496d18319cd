"""Train a byte-level BPE tokenizer and write it as a Hugging Face directory with a plain chat template.

Digits are single tokens, so that arithmetic is written column by column; runs of lower-case letters never merge with
their surroundings, so that a word is the same tokens wherever it is quoted, copied or called; every byte has a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = [PAD, END, *(f"<|{r}|>" for r in ROLES)]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int, out: Path, phrases: Sequence[str] = ()) -> None:
    """Learn merges from texts; deterministic for the same texts in the same order.

    phrases (a harness's fixed marks) become one token each, on top of vocab_size.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("[a-z]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(p, normalized=False) for p in phrases])
    out.mkdir(parents=True, exist_ok=True)
    core.save(str(out / "tokenizer.json"))
    config = {
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    ends = {"eos_token_id": core.token_to_id(END), "pad_token_id": core.token_to_id(PAD)}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=1))
