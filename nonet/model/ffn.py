"""RMSNorm and the gated feed-forward: SwiGLU, or SiTU-GLU (k3 section 1.5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nonet.model.config import ModelConfig
from nonet.ops.fused import gated, rms_norm


def wide(x: Tensor) -> Tensor:
    """x in float32 at least: for decisions whose margins are smaller than bfloat16's steps."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedActivation:
    """(gate, up) -> silu(gate) * up, or SiTU (see ops.fused.gated)."""

    def __init__(self, config: ModelConfig):
        self.situ = (config.situ_beta, config.situ_linear_beta) if config.activation == "situ" else None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return gated(gate, up, self.situ)


class FFN(nn.Module):
    """down(act(gate(x), up(x)))."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        super().__init__()
        d, f, bias = config.d_model, width or config.d_ff, config.mlp_bias
        self.gate_proj = nn.Linear(d, f, bias=bias)
        self.up_proj = nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)
        self.act = GatedActivation(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
