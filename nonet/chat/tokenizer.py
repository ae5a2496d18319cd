"""The tokenizer of a model directory: its vocabulary, its chat template, its stop ids.

Owns the only two roads from text to tokens: a whole conversation (`prompt`) and what follows an assistant turn that the
policy already wrote (`continuation`). Sampled ids are never decoded and encoded again (law 10).

Invariant: text inside a message cannot become a control token. A literal "<|im_end|>" in a tool's output is encoded as
ordinary characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from nonet.types import UserError

# A private-use character that marks special-token look-alikes in message text while the template is filled in.
_MARK = "\ue000"


class Tokenizer:
    """Loaded from a Hugging Face directory: tokenizer.json, tokenizer_config.json, generation_config.json."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        file = self.directory / "tokenizer.json"
        if not file.exists():
            raise UserError(f"{file}: no such file; a model directory needs tokenizer.json")
        self.core = tokenizers.Tokenizer.from_file(str(file))
        # A directory may carry truncation or padding from its training; both would change ids behind our back.
        self.core.no_truncation()
        self.core.no_padding()
        self.config = _read_json(self.directory / "tokenizer_config.json")
        self.generation = _read_json(self.directory / "generation_config.json")

    # ------------------------------------------------------------ plain text

    def encode(self, text: str) -> list[int]:
        """Token ids of text; control tokens spelled in it are recognised."""
        return self.core.encode(text, add_special_tokens=False).ids

    def encode_literal(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a control token."""
        self.core.encode_special_tokens = True
        try:
            return self.core.encode(text, add_special_tokens=False).ids
        finally:
            self.core.encode_special_tokens = False

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.core.decode(list(ids), skip_special_tokens=skip_special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One printable string per token; a character split over several tokens is shown on the last of them."""
        out: list[str] = []
        pending: list[int] = []
        for i in ids:
            pending.append(i)
            text = self.decode(pending)
            if text.endswith("\ufffd") and len(pending) < 8:
                out.append("")
                continue
            out.append(text)
            pending = []
        return out

    @property
    def vocab_size(self) -> int:
        return self.core.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special(self) -> dict[str, int]:
        return {t.content: i for i, t in self.core.get_added_tokens_decoder().items() if t.special}

    # ------------------------------------------------------------------ turns

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a completion: generation_config's (one or several), the EOS token, the turn's end."""
        ids = self.generation.get("eos_token_id")  # id 0 is an id like any other
        found = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        eos = _token_text(self.config.get("eos_token"))
        if eos is not None:
            found.add(self._id_of(eos, "eos_token"))
        if self.template is not None:
            found.add(self.turn_end)
        if not found:
            raise UserError(f"{self.directory}: neither generation_config.json nor tokenizer_config.json names an EOS")
        return tuple(sorted(found))

    @cached_property
    def turn_end(self) -> int:
        """The control token the template puts after an assistant's words."""
        _, _, after = self.fill(_PROBE, False).rpartition(_PROBE[-1]["content"])
        for match in re.finditer(self._special_pattern, after):
            return self.special[match.group()]
        raise UserError(f"{self.directory}: the chat template ends an assistant turn without a control token")

    @cached_property
    def template(self) -> str | None:
        text = self.config.get("chat_template")
        file = self.directory / "chat_template.jinja"
        return file.read_text() if text is None and file.exists() else text

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant to speak. messages: [{"role": ..., "content": ...}, ...]."""
        return self.encode_filled(self.fill(messages, True))

    def continuation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids that follow a finished assistant turn (its end token included) when `messages` come next.

        Found by filling the template twice around a probe conversation; a template that rewrites history when new
        messages arrive has no such ids, and is refused.
        """
        before = self.fill(_PROBE, False)
        after = self.fill([*_PROBE, *messages], True)
        end = next(text for text, i in self.special.items() if i == self.turn_end)
        cut = before.rfind(end) + len(end)
        if not after.startswith(before[:cut]):
            raise UserError(
                f"{self.directory}: the chat template rewrites earlier turns when a message is added, "
                "so sampled tokens could not be kept; use a template whose history is append-only"
            )
        return self.encode_filled(after[cut:])

    # --------------------------------------------------------------- filling

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self.template is None:
            raise UserError(f"{self.directory}: tokenizer_config.json has no chat_template; use raw text instead")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        return environment.from_string(self.template)

    def fill(
        self, messages: Sequence[Mapping[str, Any]], generate: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The filled template, for `encode_filled`: control tokens spelled in messages and tools are set between marks.

        tools: [{"type": "function", "function": {"name", "description", "parameters"}}, ...].
        """
        values: dict[str, Any] = {k: _token_text(self.config.get(k)) or "" for k in _NAMED_TOKENS}
        values |= {"messages": self._marked(list(messages)), "tools": self._marked(list(tools)) or None}
        try:
            return self._compiled.render(**values, add_generation_prompt=generate)
        # A template is somebody's program: whatever it raises on these messages is its way to refuse them.
        except Exception as e:
            raise UserError(f"{self.directory}: the chat template refused the conversation: {e}") from e

    def encode_filled(self, text: str) -> list[int]:
        """Token ids of `fill`'s text or a piece of it; what stands between marks is ordinary characters."""
        if _MARK not in text:
            return self.encode(text)
        ids: list[int] = []
        for i, piece in enumerate(text.split(_MARK)):
            ids += self.encode_literal(piece) if i % 2 else self.encode(piece)
        return ids

    @cached_property
    def _special_pattern(self) -> str:
        return "|".join(re.escape(t) for t in sorted(self.special, key=len, reverse=True)) or r"(?!)"

    def _marked(self, value: Any) -> Any:
        """The same JSON-like value with every string in it marked, keys too."""
        if isinstance(value, str):
            return re.sub(self._special_pattern, _MARK + r"\g<0>" + _MARK, value.replace(_MARK, ""))
        if isinstance(value, Mapping):
            return {self._marked(k): self._marked(v) for k, v in value.items()}
        return [self._marked(v) for v in value] if isinstance(value, list | tuple) else value

    def _id_of(self, text: str, field: str) -> int:
        found = self.core.token_to_id(text)
        if found is None:
            raise UserError(f"{self.directory}/tokenizer_config.json: {field} = {text!r} is not in tokenizer.json")
        return found


_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")
_PROBE = ({"role": "user", "content": "probe question"}, {"role": "assistant", "content": "probe answer"})


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _token_text(token: Any) -> str | None:
    """Token fields are a string, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
