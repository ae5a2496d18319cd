"""What `decode` compares: shapes of models, and cases of rows and context. Ours and each peer read the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCAB = 4096
K3_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=256, layers=8, d_ff=768, heads=4, kda_head_dim=64, decay_rank=64, kv_lora_rank=128,
    qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, tie_embeddings=False, max_position=4096,
)  # fmt: skip
K3: dict[str, Any] = dict(
    attn_res_block=2, q_lora_rank=128, norm_eps=1e-6,  # one epsilon, as a GGUF has
    moe=dict(experts=32, top_k=4, d_ff=128, shared=1, latent=128),
)  # fmt: skip
KIMI_LINEAR: dict[str, Any] = dict(
    activation="silu", decay="softplus", gate_rank=64, q_lora_rank=0, mla_gate=False,
    moe=dict(experts=32, top_k=4, d_ff=96, shared=1),
)  # fmt: skip
# One layer of MLA at the sizes of a K3 of a few hundred million parameters; what surrounds it is as small as can be.
MLA: dict[str, Any] = {
    **{**K3_SHAPE, **KIMI_LINEAR, "vocab_size": 64, "d_model": 512, "d_ff": 64, "layers": 1, "mixers": ("mla",)},
    **{"heads": 8, "kv_lora_rank": 256, "max_position": 1 << 17},
}


@dataclass(frozen=True)
class Case:
    """rows decode together, each with `past` tokens behind it, `short` and then `long` further ones."""

    key: str
    rows: int
    past: int = 16
    short: int = 4
    long: int = 28


@dataclass(frozen=True)
class Work:
    """What a worker does at every turn. weights: how ours are stored; threads: of either side."""

    model: str
    cases: tuple[Case, ...]
    weights: str = "float32"
    threads: int = 1

    def write(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)))
        return file

    @staticmethod
    def read(file: Path) -> Work:
        body = json.loads(file.read_text())
        return Work(**{**body, "cases": tuple(Case(**case) for case in body["cases"])})


def prompt(case: Case, row: int) -> list[int]:
    """Token ids that every vocabulary here has."""
    return [3 + (7 * row + 11 * i) % 60 for i in range(case.past)]


def slope(short: tuple[float, float], long: tuple[float, float], case: Case) -> dict[str, float]:
    """Seconds of one step over all rows, from (wall, cpu) seconds of the short and the long generation."""
    steps = case.long - case.short
    return {
        f"wall_{case.key}": (long[0] - short[0]) / steps,
        f"cpu_{case.key}": (long[1] - short[1]) / steps,
    }


def digest(log_probs: Sequence[float]) -> dict[str, float]:
    """What a peer must share with us: log-probs, by token id, of some tokens after the first case's prompt."""
    return {str(i): float(x) for i, x in enumerate(log_probs[:64])}
