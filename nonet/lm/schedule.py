"""The share of the peak learning rate at a step: linear up, then down in a straight line or along a cosine."""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["linear", "cosine"]


def share(step: int, steps: int, warmup: int, decay_to: float, decay: Decay) -> float:
    """step counts from 0. Up over `warmup` steps to 1, then down to `decay_to` at `steps`.

    >>> [round(share(s, 10, 2, 0.0, "cosine"), 3) for s in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    left = (steps - step) / max(1, steps - warmup)
    if decay == "cosine":
        left = 0.5 - 0.5 * math.cos(math.pi * left)
    return decay_to + (1 - decay_to) * left
