"""A tiny pretraining as a process of its own, for tests that kill it: python pretrain_job.py OUT DATA."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nonet.config import build, merge, read
from nonet.pipeline.pretraining import run_pretrain
from nonet.pipeline.recipe import Recipe

VALUES = {
    "run": {"threads": 1, "seed": 3},
    "start": {"vocab_size": 290},
    "model": {
        "d_model": 32, "layers": 4, "heads": 2, "d_ff": 48, "kda_head_dim": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "mtp_layers": 1, "attn_res_block": 2,
        "moe": {"experts": 4, "top_k": 2, "d_ff": 16, "latent": 16},
    },
    "data": {"heldout": 0.2},
    "pretrain": {
        "batch_tokens": 192, "micro_tokens": 128, "eval_every": 6, "eval_tokens": 256, "log_every": 1,
        "save_every_s": 0.0, "stages": [{"context": 24, "steps": 14}, {"context": 64, "steps": 6, "lr": 1e-3}],
    },
}  # fmt: skip


def recipe(data: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    values = merge(VALUES, {"data": {"sources": [str(data)]}})
    return build(Recipe, merge(values, read([], overrides)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_pretrain(recipe(Path(sys.argv[2])), Path(sys.argv[1]))
