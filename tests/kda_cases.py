"""Inputs of KDA that break careless kernels, and how far a result is from the recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nonet.ops.kda import kda_recurrent

GATES = ("k3", "strongest", "mixed", "none")
KEYS = ("random", "collinear")
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 1000)


def case(
    T: int, gates: str = "k3", keys: str = "random", B: int = 2, H: int = 2, K: int = 32, V: int = 48, seed: int = 0
) -> list[Tensor]:
    """q, k, v, g, beta and a state in float32, as the mixer makes them: q, k normalised, g in [-5, 0], beta in (0, 1).

    gates: k3 (mostly slow, some fast), strongest (all -5), mixed (-5 and -1e-6 at random), none (0).
    keys: random, or collinear: nearly one direction with beta near 1, as when a token repeats.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, *shape, generator=generator)

    q, k, v = normal(T, H, K), normal(T, H, K), normal(T, H, V)
    beta, noise = torch.sigmoid(normal(T, H)), normal(T, H, K)
    if keys == "collinear":
        k, beta = normal(1, H, K) + 1e-3 * k, 1 - 1e-3 * beta
    g = {
        "k3": -5 * torch.sigmoid(2 * noise - 2),
        "strongest": torch.full_like(noise, -5),
        "mixed": torch.where(noise > 0, -5.0, -1e-6),
        "none": torch.zeros_like(noise),
    }[gates]
    return [normalize(q, dim=-1) * K**-0.5, normalize(k, dim=-1), v, g, beta, normal(H, K, V)]


def error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor; inf where anything is not finite."""
    worst = 0.0
    for a, b in zip(found, right, strict=True):
        if not bool(a.isfinite().all()):
            return float("inf")
        difference = (a.detach().double() - b.detach()).abs().max()
        worst = max(worst, float(difference / b.detach().abs().max().clamp(min=1e-30)))
    return worst


def right(args: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return kda_recurrent(*(x.double() for x in args))


def gradients(fn: Callable[..., tuple[Tensor, ...]], args: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of o and the state, by every input."""
    leaves = [x.detach().clone().requires_grad_() for x in args]
    generator = torch.Generator().manual_seed(99)
    out = fn(*leaves)[:2]
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum() for x in out)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, leaves))
