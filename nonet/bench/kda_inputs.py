"""What both sides of `nonet bench kda` compute on: the same numbers from the same seed and torch version."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

HEADS, WIDTH, LENGTHS = 4, 128, (1024, 4096)
LOWER = -5.0


def made(T: int, heads: int = HEADS, width: int = WIDTH, batch: int = 1, seed: int = 0) -> list[Tensor]:
    """q (scaled), k [B, T, H, K], v, g = -5 sigmoid(normal - 3), beta [B, T, H] in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, T, heads, *shape, generator=generator)

    q, k, v = normalize(normal(width), dim=-1) * width**-0.5, normalize(normal(width), dim=-1), normal(width)
    return [q, k, v, LOWER * torch.sigmoid(normal(width) - 3), torch.sigmoid(normal())]


def digest(o: Tensor) -> list[float]:
    """A few numbers by which two sides tell that they computed the same."""
    wide = o.double().flatten()
    return [float(wide.square().mean()), *wide[:: max(1, len(wide) // 16)][:16].tolist()]
