"""An exported draft in vLLM against the same draft in this engine: greedy, float32, step by step.

    python -m nonet.bench.draft_vllm TARGET DRAFT [PROMPTS] [TOKENS] [DRAFTED]

DRAFT is a nonet draft; it is exported here. Both engines write the same number of tokens of the same prompts; what a
verifying step wrote is compared one by one. Where answers part, the gap between the two tokens' logits is printed:
under 1e-3 it is float32 arithmetic, not the draft. The last step is left out: each engine ends in its own way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import nonet
from nonet.chat import Tokenizer, prompt
from nonet.draft import files, prompts
from nonet.draft.drafter import TorchDrafter
from nonet.draft.export import export
from nonet.draft.model import Draft
from nonet.engine import Engine
from nonet.model import Model, hf
from nonet.types import Request, Sampling, UserError

ROOT = Path(nonet.__path__[0]).parent
PATIENCE_S = 1800.0
SETTINGS = {
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"},
    **{"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
}


@dataclass(frozen=True)
class Answer:
    """steps: how many tokens each step wrote, the first one out of the prompt."""

    tokens: list[int]
    steps: list[int]


@dataclass(frozen=True)
class Compared:
    """positions: verifying steps whose first k drafted tokens stood, k = 1 .. K, here and there. parted: answers that
    differ, each with where and by how much of a logit.
    """

    answers: int
    same_tokens: int
    same_steps: int
    ours: list[int]
    theirs: list[int]
    parted: list[dict[str, float]]


def python() -> Path:
    """The interpreter of vLLM's venv."""
    found = ROOT / ".peers" / "vllm" / "bin" / "python"
    if not found.exists():
        raise UserError("bench draft_vllm: needs the vllm venv; run `make peers`")
    return found


def theirs(target: Path, published: Path, asked: Sequence[Sequence[int]], tokens: int, drafted: int) -> list[Answer]:
    with TemporaryDirectory() as name:
        question, answer = Path(name) / "question.json", Path(name) / "answer.json"
        facts = {"target": str(target.resolve()), "draft": str(published.resolve()), "drafted": drafted}
        question.write_text(json.dumps({**facts, "tokens": tokens, "prompts": [list(ids) for ids in asked]}))
        command = [str(python()), str(ROOT / "peers" / "vllm_draft.py"), str(question), str(answer)]
        environment = {**os.environ, **SETTINGS}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environment)
        if done.returncode or not answer.exists():
            raise RuntimeError(f"vLLM failed on {published} with status {done.returncode}: {done.stderr[-3000:]}")
        return [Answer(**a) for a in json.loads(answer.read_text())["answers"]]


def ours(draft: Draft, asked: Sequence[Sequence[int]], tokens: int, drafted: int) -> list[Answer]:
    engine = Engine(draft.target, 1, drafter=TorchDrafter(draft, drafted), prefix_cache=False)
    return [_answered(engine, str(i), ids, tokens) for i, ids in enumerate(asked)]


def _answered(engine: Engine, name: str, ids: Sequence[int], tokens: int) -> Answer:
    engine.submit(Request(name, tuple(ids), tokens, (), Sampling(0.0)))
    written: list[int] = []
    steps: list[int] = []
    while engine.busy:
        ended = engine.step()
        now = ended[0] if ended else engine.written(name)
        if now is not None and len(now.tokens) > len(written):
            steps.append(len(now.tokens) - len(written))
            written = list(now.tokens)
    return Answer(written, steps)


def compare(
    model: Model, asked: Sequence[Sequence[int]], mine: Sequence[Answer], other: Sequence[Answer], drafted: int
) -> Compared:
    parted = [_parting(model, ids, a, b) for ids, a, b in zip(asked, mine, other, strict=True) if a.tokens != b.tokens]
    alike = [(a, b) for a, b in zip(mine, other, strict=True) if a.tokens == b.tokens]
    return Compared(
        len(asked), len(alike), sum(a.steps[:-1] == b.steps[:-1] for a, b in alike),
        by_position([a for a, _ in alike], drafted), by_position([b for _, b in alike], drafted), parted,
    )  # fmt: skip


def by_position(answers: Sequence[Answer], drafted: int) -> list[int]:
    """Steps whose first k drafted tokens stood; the prompt's own step and the last are no verifying steps."""
    verifying = [n for a in answers for n in a.steps[1:-1]]
    return [sum(n > k for n in verifying) for k in range(1, drafted + 1)]


@torch.inference_mode()
def _parting(model: Model, ids: Sequence[int], a: Answer, b: Answer) -> dict[str, float]:
    at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a.tokens, b.tokens, strict=False))))
    known = torch.tensor([[*ids, *a.tokens[:at]]])
    logits_W = model.logits(model(known)[:, -1])[0]
    return {"at": at, "gap": float((logits_W[a.tokens[at]] - logits_W[b.tokens[at]]).abs())}


def loaded(target: Path, folder: Path) -> Draft:
    return files.load(folder, hf.load(target), files.vocabulary_hash(target))


def asked_of(target: Path, count: int) -> list[tuple[int, ...]]:
    """Fixed held-out prompts, of three kinds alike."""
    tokenizer, third = Tokenizer(target), count // 3
    shares = {"gym": third, "chat": third, "human-eval": count - 2 * third}
    held = [c for name, n in shares.items() for c in prompts.load(name, True)[:n]]
    return [prompt(tokenizer, c.messages).tokens for c in held]


def run(target: Path, folder: Path, count: int = 20, tokens: int = 64, drafted: int = 4) -> Compared:
    draft, asked = loaded(target, folder), asked_of(target, count)
    with TemporaryDirectory() as name:
        published = export(draft, target, Path(name) / "draft", "vllm", drafted)
        other = theirs(target, published, asked, tokens, drafted)
    return compare(draft.target, asked, ours(draft, asked, tokens, drafted), other, drafted)


if __name__ == "__main__":
    print(json.dumps(asdict(run(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))))
