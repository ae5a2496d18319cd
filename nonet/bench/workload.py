"""The RL step that both sides of `rl_step` take, as numbers: same weights, prompts, budget, reward and learning rate.

Imports only the standard library: the peer reads it in a venv of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """32 completions of 128 tokens by a Llama of 0.92M parameters over bytes, then one policy update."""

    prompts: int = 4  # per step
    samples: int = 8  # per prompt
    new_tokens: int = 128  # exactly: end-of-sequence is suppressed
    lr: float = 1e-4
    threads: int = 2
    seed: int = 0
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 384

    @property
    def completions(self) -> int:
        return self.prompts * self.samples

    def write(self, folder: Path) -> None:
        (folder / "workload.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Workload:
        return Workload(**json.loads((folder / "workload.json").read_text()))


@dataclass(frozen=True)
class Prompt:
    """A question, the text it becomes under the chat template, and the ids of that text."""

    question: str
    text: str
    ids: Sequence[int]


def questions(seed: int, count: int = 64) -> list[str]:
    """Questions of equal length, so that neither side pads."""
    digits = [f"{int.from_bytes(_digest(f'{seed}/{i}'), 'big') % 10**8:08d}" for i in range(count)]
    return [f"What is {d[:4]} + {d[4:]}?" for d in digits]


def write_prompts(prompts: Sequence[Prompt], folder: Path) -> None:
    (folder / "prompts.json").write_text(json.dumps([asdict(p) for p in prompts]))


def read_prompts(folder: Path) -> list[Prompt]:
    return [Prompt(**p) for p in json.loads((folder / "prompts.json").read_text())]


def hash_reward(text: str, seed: int) -> float:
    """In [0, 1), different for different texts: no group is dead, and nothing can be learned from it."""
    return int.from_bytes(_digest(f"{seed}/{text}"), "big") / 2**64


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
