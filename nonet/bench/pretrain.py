"""Training speed beside transformers' Kimi-Linear: same shape, same weights, forward and backward, one thread.

vs_hf_kimi_linear is the median over rounds of (their CPU seconds / ours) for one forward and backward of the same
tokens, ours and theirs in turn. transformers runs its own torch code, as it does wherever its GPU kernels are not
installed. Three shapes: dense; the same with K3's bounded decay in place of Kimi-Linear's softplus on our side (theirs
has only softplus; every matrix is as large); a small mixture of experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nonet.model import Model, ModelConfig, hf
from nonet.model.config import MoEConfig
from nonet.model.init import initialise
from nonet.progress import progress
from nonet.types import UserError

ROUNDS, BATCH, LENGTH, TARGET = 7, 2, 512, 3.0
_HEAD = 64
KIMI: dict[str, Any] = dict(
    vocab_size=4096, d_model=256, layers=8, heads=4, d_ff=1024, kda_head_dim=_HEAD, decay_rank=_HEAD, gate_rank=_HEAD,
    decay="softplus", q_lora_rank=0, kv_lora_rank=64, qk_nope_head_dim=_HEAD, qk_rope_head_dim=32, v_head_dim=_HEAD,
    mla_gate=False, activation="silu", tie_embeddings=False,
)  # fmt: skip
MOE = MoEConfig(experts=16, top_k=4, d_ff=256, shared=1, dense_layers=1, scale=2.4)


@dataclass(frozen=True)
class Shape:
    name: str
    theirs: ModelConfig
    ours: ModelConfig


SHAPES = (
    Shape("vs_hf_kimi_linear", ModelConfig(**KIMI), ModelConfig(**KIMI)),
    Shape("vs_hf_kimi_linear_bounded", ModelConfig(**KIMI), ModelConfig(**{**KIMI, "decay": "bounded"})),
    Shape("vs_hf_kimi_linear_moe", ModelConfig(**KIMI, moe=MOE), ModelConfig(**KIMI, moe=MOE)),
)


def measure() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with progress("bench pretrain: rounds", len(SHAPES) * ROUNDS) as bar:
            found = {}
            for i, shape in enumerate(SHAPES):
                found[shape.name] = compare(shape, ROUNDS, lambda r, i=i: bar(i * ROUNDS + r, ""))
    finally:
        torch.set_num_threads(threads)
    out: dict[str, Any] = {name: f["ratio"] for name, f in found.items()}
    out["target"] = TARGET
    for key in ("ratio_range", "tokens_per_cpu_s", "parameters", "loss_difference"):
        out[key] = {name: f[key] for name, f in found.items()}
    out |= {"tokens": f"{BATCH} x {LENGTH}", "rounds": ROUNDS, "threads": 1}
    return {**out, "versions": {"transformers": metadata.version("transformers")}}


def compare(shape: Shape, rounds: int, done: Callable[[int], None]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(shape.ours.vocab_size, (BATCH, LENGTH), generator=generator)
    ours, theirs = pair(shape)
    steps = {"ours": lambda: our_step(ours, tokens_BT), "theirs": lambda: their_step(theirs, tokens_BT)}
    losses = {name: step() for name, step in steps.items()}  # warm-up
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for r in range(rounds):
        for name in sorted(steps, reverse=r % 2 == 1):
            began = time.process_time()
            steps[name]()
            taken[name].append(time.process_time() - began)
        done(r + 1)
    ratios = sorted(b / a for a, b in zip(taken["ours"], taken["theirs"], strict=True))
    same = shape.ours == shape.theirs
    return {
        "ratio": median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
        "tokens_per_cpu_s": {name: tokens_BT.numel() / median(t) for name, t in taken.items()},
        "parameters": {"ours": trainable(ours), "theirs": trainable(theirs)},
        "loss_difference": abs(losses["ours"] - losses["theirs"]) if same else None,
    }


def pair(shape: Shape) -> tuple[Model, Any]:
    """Our model, and transformers' with the weights of the same seed at its own config."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as e:
        raise UserError('bench pretrain: needs transformers; run pip install "nonet[dev]"') from e
    with TemporaryDirectory() as folder:
        hf.save(initialise(Model(shape.theirs), 0), folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return initialise(Model(shape.ours), 0).train(), theirs.train()


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def our_step(model: Model, tokens_BT: Tensor) -> float:
    logits_BTW = model.logits(model(tokens_BT)[:, :-1])
    loss = F.cross_entropy(logits_BTW.flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    model.zero_grad()
    return loss.item()


def their_step(model: Any, tokens_BT: Tensor) -> float:
    logits_BTW = model(tokens_BT, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits_BTW.flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    model.zero_grad()
    return loss.item()
