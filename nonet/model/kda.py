"""The KDA mixer: projections, short convolutions, gates and norms around `ops.kda` (k3 section 1.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nonet.model.config import ModelConfig
from nonet.model.ffn import RMSNorm
from nonet.model.span import Span
from nonet.model.tree import Tree
from nonet.ops.kda import kda, kda_epilogue, kda_prologue, kda_step_


@dataclass(frozen=True)
class Inputs:
    """What stands in front of the scan, by position: projections of q, k and v, decay logits (None: no decay), beta's
    logits.
    """

    projected: tuple[Tensor, Tensor, Tensor]
    z_BTC: Tensor | None
    b_BTH: Tensor

    def part(self, begin: int, end: int) -> Inputs:
        q, k, v = (x[:, begin:end] for x in self.projected)
        return Inputs((q, k, v), None if self.z_BTC is None else self.z_BTC[:, begin:end], self.b_BTH[:, begin:end])


class KDA(nn.Module):
    """q, k, v: linear -> causal depthwise convolution -> SiLU, q and k L2-normalised; a decay per key channel; output
    sigmoid(gate x) * RMSNorm_head(o). K3: g = lower * sigmoid(a z), full gate. Kimi-Linear: g = -a softplus(z), gate of
    low rank. z = W_fb W_fa x + dt_bias, a = exp(A_log) of the head.
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
        starts = None if span.documents is None else span.documents.starts
        tail_BPX = None if state is None else state["tail"][span.slots]
        projected = (self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD))
        z_BTC = None if self.decay == "none" else self.f_b_proj(self.f_a_proj(x_BTD))
        inputs = Inputs(projected, z_BTC, self.b_proj(x_BTD))
        if span.tree is not None:
            o = self._branch(inputs, span.tree)
            return self._out(o, x_BTD)
        q, k, v, g, beta, tail = self._prepared(inputs, tail_BPX, starts, span.counts_B)
        if state is None:
            o = kda(q, k, v, g, beta, None, self.floor, starts=starts, counts=span.counts_B)[0]
        elif span.after_BT is not None:
            assert tail_BPX is not None
            inputs_BTX = torch.cat([tail_BPX, torch.cat(projected, -1)], 1)
            state["tail"][span.after_BT] = inputs_BTX.unfold(1, self.kernel - 1, 1)[:, 1:].transpose(2, 3)
            o = self._walk(q, k, v, g, beta, state["matrix"], span)
        else:
            state["tail"][span.slots] = tail
            o = self._extend(q, k, v, g, beta, state["matrix"], span)
        return self._out(o, x_BTD)

    def _prepared(
        self, inputs: Inputs, tail_BPX: Tensor | None, starts: Sequence[int] | None, counts_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta and the last inputs of the convolutions."""
        return kda_prologue(
            inputs.projected,
            (self.q_conv1d.weight[:, 0], self.k_conv1d.weight[:, 0], self.v_conv1d.weight[:, 0]),
            tail_BPX,
            inputs.z_BTC,
            inputs.b_BTH,
            self.A_log,
            self.dt_bias,
            self.floor,
            starts=starts,
            counts=counts_B,
        )

    def _branch(self, inputs: Inputs, tree: Tree) -> Tensor:
        """Shared parts first; own ones go on from their group's state and last inputs."""
        first, then = inputs.part(0, tree.split), inputs.part(tree.split, tree.total)
        q, k, v, g, beta, tail_GPX = self._prepared(first, None, tree.shared_starts)
        shared, state_GHKV = kda(q, k, v, g, beta, None, self.floor, starts=tree.shared_starts)
        q, k, v, g, beta, _ = self._prepared(then, tail_GPX[tree.parent_S], tree.own_starts)
        own, _ = kda(q, k, v, g, beta, state_GHKV[tree.parent_S], self.floor, starts=tree.own_starts)
        return torch.cat([shared, own], 1)

    def _out(self, o_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        gate = self.g_b_proj(self.g_a_proj(x_BTD)) if self.low_rank else self.g_proj(x_BTD)
        return self.o_proj(kda_epilogue(o_BTHV, gate, self.o_norm.weight, self.o_norm.eps))

    @property
    def floor(self) -> float | None:
        """What g never falls below; None: nothing stops it (Kimi-Linear)."""
        return None if self.decay == "softplus" else self.lower

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, span: Span) -> Tensor:
        """Advance the rows' matrices, pool[span.slots]: in place where that is a view."""
        matrix = pool[span.slots]
        if q.shape[1] == 1 and span.counts_B is None:
            o = kda_step_(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], matrix).unsqueeze(1)
            if not isinstance(span.slots, slice):
                pool[span.slots] = matrix
            return o
        o, pool[span.slots] = kda(q, k, v, g, beta, matrix, self.floor, counts=span.counts_B)
        return o

    def _walk(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, span: Span) -> Tensor:
        """Token by token, keeping the matrices after each, [B] of them in pool[span.after_BT[:, t]]."""
        assert span.after_BT is not None
        matrix, out = pool[span.slots].clone(), []
        for t in range(q.shape[1]):
            out.append(kda_step_(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], matrix))
            pool[span.after_BT[:, t]] = matrix
        return torch.stack(out, 1)
