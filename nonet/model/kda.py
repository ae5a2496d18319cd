"""The KDA mixer: projections, short convolutions, gates and norms around `ops.kda` (k3 section 1.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nonet.model.attention import Span
from nonet.model.config import ModelConfig
from nonet.model.ffn import RMSNorm
from nonet.ops.kda import kda_chunk, kda_step_


class KDA(nn.Module):
    """q, k, v: linear -> causal depthwise convolution -> SiLU, q and k L2-normalised; bounded decay per key channel;
    output sigmoid(g_proj x) * RMSNorm_head(o).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.heads, self.dim, self.kernel, self.lower = c.heads, c.kda_head_dim, c.conv_kernel, c.gate_lower_bound
        width = c.kda_width
        self.q_proj = nn.Linear(c.d_model, width, bias=False)
        self.k_proj = nn.Linear(c.d_model, width, bias=False)
        self.v_proj = nn.Linear(c.d_model, width, bias=False)
        self.q_conv1d = nn.Conv1d(width, width, self.kernel, groups=width, bias=False)
        self.k_conv1d = nn.Conv1d(width, width, self.kernel, groups=width, bias=False)
        self.v_conv1d = nn.Conv1d(width, width, self.kernel, groups=width, bias=False)
        self.f_a_proj = nn.Linear(c.d_model, c.decay_rank, bias=False)
        self.f_b_proj = nn.Linear(c.decay_rank, width, bias=False)
        self.b_proj = nn.Linear(c.d_model, c.heads, bias=False)
        self.g_proj = nn.Linear(c.d_model, width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(c.heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = RMSNorm(self.dim, c.norm_eps)
        self.o_proj = nn.Linear(width, c.d_model, bias=False)

    def forward(self, x_BTD: Tensor, span: Span, state: dict | None) -> Tensor:
        B, T, _ = x_BTD.shape
        mixed = torch.cat([self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)], -1)
        q, k, v = F.silu(self._convolve(mixed, span, state)).view(B, T, 3, self.heads, self.dim).unbind(2)
        q, k = l2_normalise(q) * self.dim**-0.5, l2_normalise(k)
        g = self.log_decay(x_BTD).view(B, T, self.heads, self.dim)
        beta = torch.sigmoid(self.b_proj(x_BTD))
        if span.valid_BT is not None:
            g, beta = g * span.valid_BT[:, :, None, None], beta * span.valid_BT[:, :, None]
        o = self._scan(q, k, v, g, beta, state)
        return self.o_proj(torch.sigmoid(self.g_proj(x_BTD)) * self.o_norm(o).reshape(B, T, -1))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """g in (lower_bound, 0): lower * sigmoid(exp(A_h) * (W_fb W_fa x + dt_bias))."""
        z = self.f_b_proj(self.f_a_proj(x_BTD)) + self.dt_bias
        return self.lower * torch.sigmoid(self.A_log.exp().repeat_interleave(self.dim) * z)

    def _convolve(self, mixed_BTC: Tensor, span: Span, state: dict | None) -> Tensor:
        """Depthwise causal convolution as shifted products; the last kernel-1 real inputs stay in the state."""
        past = self.kernel - 1
        if state is None:
            joined = F.pad(mixed_BTC, (0, 0, past, 0))
        else:
            joined = torch.cat([state["tail"], mixed_BTC], 1)
            state["tail"].copy_(last_valid(joined, past, span))
        taps_CJ = torch.cat([conv.weight[:, 0] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        T = mixed_BTC.shape[1]
        out = joined[:, :T] * taps_CJ[:, 0]
        for j in range(1, self.kernel):
            out = torch.addcmul(out, joined[:, j : j + T], taps_CJ[:, j])
        return out

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: dict | None) -> Tensor:
        B, T, H, K = q.shape
        if state is None:
            return kda_chunk(q, k, v, g, beta, q.new_zeros(B, H, K, K), self.lower)[0]
        if T == 1:
            return kda_step_(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state["matrix"]).unsqueeze(1)
        o, matrix = kda_chunk(q, k, v, g, beta, state["matrix"], self.lower)
        state["matrix"].copy_(matrix)
        return o


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def last_valid(joined_BSC: Tensor, past: int, span: Span) -> Tensor:
    """The `past` inputs before each row's end; `joined` is `past` old inputs followed by this call's, right-padded."""
    if span.counts_B is None:
        return joined_BSC[:, -past:]
    index = span.counts_B[:, None] + torch.arange(past, device=joined_BSC.device)
    return joined_BSC[torch.arange(len(joined_BSC), device=joined_BSC.device)[:, None], index]


def init_dt_bias_(dt_bias: Tensor, generator: torch.Generator | None) -> None:
    """softplus^-1 of log-uniform [1e-3, 1e-1] (Mamba-2): at the start most channels forget slowly."""
    u = torch.rand(dt_bias.shape, generator=generator)
    dt = torch.exp(u * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
