"""The KDA mixer: projections, short convolutions, gates and norms around `ops.kda` (k3 section 1.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nonet.model.config import ModelConfig
from nonet.model.ffn import RMSNorm
from nonet.model.span import Span
from nonet.ops.kda import kda_chunk, kda_recurrent, kda_step_


class KDA(nn.Module):
    """q, k, v: linear -> causal depthwise convolution -> SiLU, q and k L2-normalised; a decay per key channel; output
    sigmoid(gate x) * RMSNorm_head(o). K3: bounded decay, full gate. Kimi-Linear: softplus decay, low-rank gate.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.heads, self.dim, self.kernel = c.heads, c.kda_head_dim, c.conv_kernel
        self.decay, self.lower = c.decay, c.gate_lower_bound
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
        self.low_rank = c.gate_rank > 0
        if self.low_rank:
            self.g_a_proj = nn.Linear(c.d_model, c.gate_rank, bias=False)
            self.g_b_proj = nn.Linear(c.gate_rank, width, bias=False)
        else:
            self.g_proj = nn.Linear(c.d_model, width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(c.heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = RMSNorm(self.dim, c.norm_eps)
        self.o_proj = nn.Linear(width, c.d_model, bias=False)

    def forward(self, x_BTD: Tensor, span: Span, state: dict | None) -> Tensor:
        mixed = torch.cat([self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)], -1)
        g, beta = self.log_decay(x_BTD), torch.sigmoid(self.b_proj(x_BTD))
        valid_BT, documents = span.valid_BT, span.documents
        if documents is not None:  # one row each: neither convolution nor state crosses over
            mixed, g, beta = documents.pad(mixed), documents.pad(g), documents.pad(beta)
            valid_BT = documents.valid_BT
        B, T, _ = mixed.shape
        q, k, v = F.silu(self._convolve(mixed, span, state)).view(B, T, 3, self.heads, self.dim).unbind(2)
        q, k = l2_normalise(q) * self.dim**-0.5, l2_normalise(k)
        g = g.view(B, T, self.heads, self.dim)
        if valid_BT is not None:
            g, beta = g * valid_BT[:, :, None, None], beta * valid_BT[:, :, None]
        o = self.o_norm(self._scan(q, k, v, g, beta, state)).reshape(B, T, -1)
        if documents is not None:
            o = documents.unpad(o)
        gate = self.g_b_proj(self.g_a_proj(x_BTD)) if self.low_rank else self.g_proj(x_BTD)
        return self.o_proj(torch.sigmoid(gate) * o)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """g <= 0 per key channel, from z = W_fb W_fa x + dt_bias and a = exp(A_log) of the head.

        bounded (K3): lower * sigmoid(a z), in (lower, 0). softplus (Kimi-Linear): -a softplus(z), without a floor.
        none: 0.
        """
        z = self.f_b_proj(self.f_a_proj(x_BTD)) + self.dt_bias
        if self.decay == "none":
            return torch.zeros_like(z)
        a = self.A_log.exp().repeat_interleave(self.dim)
        return self.lower * torch.sigmoid(a * z) if self.decay == "bounded" else -a * F.softplus(z)

    def _convolve(self, mixed_BTC: Tensor, span: Span, state: dict | None) -> Tensor:
        """Depthwise causal convolution as shifted products; the last kernel-1 real inputs stay in the state."""
        past = self.kernel - 1
        if state is None:
            joined = F.pad(mixed_BTC, (0, 0, past, 0))
        else:
            joined = torch.cat([state["tail"], mixed_BTC], 1)
            if past:
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
            return self._many(q, k, v, g, beta, q.new_zeros(B, H, K, K))[0]
        if T == 1:
            return kda_step_(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state["matrix"]).unsqueeze(1)
        o, matrix = self._many(q, k, v, g, beta, state["matrix"])
        state["matrix"].copy_(matrix)
        return o

    def _many(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, matrix_BHKV: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.decay == "softplus":  # no floor under the decay: chunks would overflow
            return kda_recurrent(q, k, v, g, beta, matrix_BHKV)
        return kda_chunk(q, k, v, g, beta, matrix_BHKV, self.lower)


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def last_valid(joined_BSC: Tensor, past: int, span: Span) -> Tensor:
    """The `past` inputs before each row's end; `joined` is `past` old inputs followed by this call's, right-padded."""
    if span.counts_B is None:
        return joined_BSC[:, -past:]
    index = span.counts_B[:, None] + torch.arange(past, device=joined_BSC.device)
    return joined_BSC[torch.arange(len(joined_BSC), device=joined_BSC.device)[:, None], index]
