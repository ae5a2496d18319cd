"""Chat templates of several kinds, in our own words, on the control tokens of the trained tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nonet.chat import Tokenizer

_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = "{% if tools %}<|system|>Tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|end|>{% endif %}" + _TURNS
# Writes an earlier answer without its last word: no boundary after an answer can be kept.
REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content[:-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Refuses a conversation whose last word is not the user's.
STRICT = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the user must speak last') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


def with_template(directory: Path, template: str, out: Path) -> Tokenizer:
    """A copy of a tokenizer directory under another chat template."""
    shutil.copytree(directory, out, dirs_exist_ok=True)
    file = out / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return Tokenizer(out)
