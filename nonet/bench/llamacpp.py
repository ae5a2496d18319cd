"""llama.cpp asked about a GGUF file, in its own venv (peers/llamacpp_ask.py does the asking)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import nonet
from nonet.types import UserError

ROOT = Path(nonet.__path__[0]).parent
ASK_S = 240.0


@dataclass(frozen=True)
class Answer:
    """log_probs: per prompt, of every token of the vocabulary after it. ids: per text, what llama.cpp makes of it."""

    log_probs: list[list[float]]
    ids: list[list[int]]
    version: str


def python() -> Path:
    """The interpreter of llama.cpp's venv."""
    found = ROOT / ".peers" / "llamacpp" / "bin" / "python"
    if not found.exists():
        raise UserError("bench parity: needs the llama.cpp venv; run `make peers`")
    return found


def ask(
    model: Path, vocab: int, prompts: Sequence[Sequence[int]] = (), texts: Sequence[str] = (), neutral: int = 0
) -> Answer:
    """Load `model` and ask. neutral: a token of plain text, see peers/llamacpp_ask.py."""
    with TemporaryDirectory() as name:
        question, answer = Path(name) / "question.json", Path(name) / "answer.json"
        asked = {"model": str(model.resolve()), "vocab": vocab, "neutral": neutral}
        asked |= {"prompts": [list(ids) for ids in prompts], "texts": list(texts)}
        question.write_text(json.dumps(asked))
        command = [str(python()), str(ROOT / "peers" / "llamacpp_ask.py"), str(question), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
        if done.returncode or not answer.exists():
            raise RuntimeError(f"llama.cpp failed on {model} with status {done.returncode}: {done.stderr[-2000:]}")
        return Answer(**json.loads(answer.read_text()))
