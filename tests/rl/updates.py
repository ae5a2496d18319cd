"""Batches that a model wrote and the gradients a learner makes of them."""

from __future__ import annotations

import copy
from typing import Any

import made
import torch
from torch import Tensor

from nonet.model import Model
from nonet.rl.batch import PackedBatch, Scored
from nonet.rl.config import RLConfig
from nonet.rl.learner import Learner
from nonet.types import Segment

ONE: dict[str, Any] = dict(minibatches=1, warmup=0, lr=1e-2, check_ratio=1e9)
SHAPES = [
    [("prompt", 3), ("policy", 4)],
    [("prompt", 5), ("policy", 9), ("tool", 4), ("policy", 2)],
    [("prompt", 1), ("policy", 1)],
    [("prompt", 2), ("policy", 3), ("tool", 8), ("policy", 12)],
]


def scored(m: Model, n: int = 8, drift: float = 0.0) -> list[Scored]:
    """n attempts of different shapes, written by m; drift moves the recorded log-probs away from what m says now."""
    noise = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        t = made.written_by(m, made.trajectory(i // 4, i % 4, SHAPES[i % 4]))
        for j, s in enumerate(t.segments):
            if s.author == "policy" and drift:
                moved = [x + drift * float(torch.randn((), generator=noise)) for x in s.logprobs]
                t.segments[j] = Segment("policy", s.tokens, tuple(moved), s.raw_logprobs, s.policy_version)
        out.append(Scored.uniform(t, (-1.0) ** i * (0.5 + i / 10)))
    return out


def gradient(m: Model, batch: PackedBatch, **over) -> tuple[dict[str, Tensor], dict]:
    """Gradients by name that one minibatch over the batch arrives at, and the step's statistics."""
    learner = Learner(copy.deepcopy(m), RLConfig(**{**ONE, **over}))
    found: dict[str, Tensor] = {}

    def capture(lr: float, grad_clip: float) -> float:
        found.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})
        return 0.0

    learner.optimizer.step = capture
    return found, learner.step(batch)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert a.keys() == b.keys()
    scale = max(float(g.abs().max()) for g in a.values())
    assert scale > 0
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * scale * 1e-2)
