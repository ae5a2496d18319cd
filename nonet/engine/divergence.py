"""Where two runs that should have written the same part, and by how little they could be told apart.

Kernels that add in another order give logits that differ in the last bits, so a greedy run may take the other of two
tokens that are nearly equal; from there on the texts are unrelated. A gap of 1e-3 or less is such a tie; a larger one
is a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from nonet.model import Model


@dataclass(frozen=True)
class Divergence:
    """position: how many tokens both wrote alike; expected, found: the next ones; gap: between their logits."""

    position: int
    expected: int
    found: int
    gap: float


@torch.inference_mode()
def first_divergence(
    model: Model, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> Divergence | None:
    """None if the shorter is the beginning of the other. The gap is logit(expected) - logit(found) of a fresh forward
    over what both have in common; it is negative where the model prefers what was found.
    """
    pairs = list(zip(expected, found, strict=False))
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if alike == len(pairs):
        return None
    known = torch.tensor([[*prompt, *expected[:alike]]], device=model.embed_tokens.weight.device)
    logits_W = model.logits(model(known)[0, -1])
    wanted, other = pairs[alike]
    return Divergence(alike, wanted, other, float(logits_W[wanted] - logits_W[other]))
