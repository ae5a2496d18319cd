"""Trajectories and groups made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tiny
import torch

from nonet.model import Model
from nonet.types import Segment, Trajectory

Part = tuple[str, int]  # author, number of tokens


def trajectory(
    group: int = 0,
    sample: int = 0,
    parts: Sequence[Part] = (("prompt", 3), ("policy", 4)),
    vocab: int = 61,
    **over: Any,
) -> Trajectory:
    """A finished attempt of random tokens; policy log-probs are 0 until `written_by` fills them in."""
    t = Trajectory(f"task {group}", group, sample, status="done")
    ids = iter(tiny.tokens(400, vocab=vocab, seed=1000 * group + sample).tolist())
    for version, (author, n) in enumerate(parts):
        tokens = tuple(next(ids) for _ in range(n))
        zeros = (0.0,) * n if author == "policy" else ()
        t.segments.append(Segment(author, tokens, zeros, zeros, version if author == "policy" else -1))
    for name, value in over.items():
        setattr(t, name, value)
    return t


def written_by(model: Model, t: Trajectory, version: int = 0, temperature: float = 1.0) -> Trajectory:
    """The same trajectory with the log-probs `model` gives its policy tokens, all under one version."""
    tokens = torch.tensor([t.tokens])
    with torch.no_grad():
        logps = (model.logits(model(tokens))[0, :-1] / temperature).log_softmax(-1)
    picked = logps.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    at = 0
    for i, s in enumerate(t.segments):
        if s.author == "policy":
            values = tuple(picked[at - 1 : at - 1 + len(s.tokens)])
            t.segments[i] = Segment("policy", s.tokens, values, values, version)
        at += len(s.tokens)
    return t


def group(rewards: Sequence[float | None], number: int = 0) -> list[Trajectory]:
    """One group; a reward of None is a failed member."""
    out = []
    for i, r in enumerate(rewards):
        out.append(trajectory(number, i))
        if r is None:
            out[-1].status, out[-1].stop_reason = "failed", "sandbox: OSError: gone"
        else:
            out[-1].rewards = {"r": r}
    return out
