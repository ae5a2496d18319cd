"""An exported draft in llama.cpp against the same draft in this engine: greedy, float32, how many drafted tokens stood.

    python -m nonet.bench.draft_llamacpp TARGET DRAFT [PROMPTS] [TOKENS] [DRAFTED]

DRAFT is a nonet draft; it and its target are written as GGUF files here. llama.cpp counts over a whole answer, so that
is what is compared; near the end of an answer both engines propose less.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nonet.bench.draft_vllm import Answer, asked_of, loaded, ours
from nonet.bench.llamacpp import ROOT, python
from nonet.convert.gguf_eagle3 import export_eagle3
from nonet.convert.gguf_writer import export as export_gguf
from nonet.draft.export import export
from nonet.draft.model import Draft

PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Counted:
    """ours, theirs: of each answer, how many drafted tokens stood. parted: answers whose tokens differ."""

    answers: int
    parted: int
    ours: list[int]
    theirs: list[int]


def theirs(
    draft: Draft, target: Path, asked: Sequence[Sequence[int]], tokens: int, drafted: int
) -> list[tuple[list[int], int]]:
    """(tokens, how many were drafted and stood) of each answer."""
    with TemporaryDirectory() as name:
        work = Path(name)
        model = export_gguf(target, work / "target.gguf", dtype="f32")
        head = export_eagle3(export(draft, target, work / "published", "vllm"), target, work / "draft.gguf", "f32")
        question, answer = work / "question.json", work / "answer.json"
        facts = {"target": str(model), "draft": str(head), "drafted": drafted, "tokens": tokens}
        question.write_text(json.dumps({**facts, "prompts": [list(ids) for ids in asked]}))
        command = [str(python()), str(ROOT / "peers" / "llamacpp_draft.py"), str(question), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        if done.returncode or not answer.exists():
            raise RuntimeError(f"llama.cpp failed with status {done.returncode}: {done.stderr[-3000:]}")
        return [(a["tokens"], a["accepted"]) for a in json.loads(answer.read_text())["answers"]]


def counted(mine: Sequence[Answer], other: Sequence[tuple[list[int], int]]) -> Counted:
    alike = [(a, n) for a, (tokens, n) in zip(mine, other, strict=True) if a.tokens == tokens]
    stood = [sum(n - 1 for n in a.steps[1:]) for a, _ in alike]
    return Counted(len(mine), len(mine) - len(alike), stood, [n for _, n in alike])


def run(target: Path, folder: Path, count: int = 20, tokens: int = 64, drafted: int = 4) -> Counted:
    draft = loaded(target, folder)
    asked = asked_of(target, count)
    return counted(ours(draft, asked, tokens, drafted), theirs(draft, target, asked, tokens, drafted))


if __name__ == "__main__":
    print(json.dumps(asdict(run(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))))
