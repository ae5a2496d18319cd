"""What stands in front of the KDA scan, fused: causal convolution, SiLU, L2 norm of q and k, activation of the gates.

    y_t = sum_j taps_j x_{t-J+1+j}      s = y sigmoid(y)
    v = s      k = s / sqrt(|s|^2 + 1e-6)      q alike, times K^-1/2
    g = lower_bound * sigmoid(e^A_log (z + dt_bias)), or -e^A_log * softplus(z + dt_bias)      beta = sigmoid(b)

In torch this costs as much as the scan itself; in C it is one pass over the inputs, and one more for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nonet.ops.kda_native import address, call, dense, fits, wants_gradient
from nonet.ops.sequences import Sequences

Three = tuple[Tensor, Tensor, Tensor]
TAPS = 4  # what the C side convolves with; other kernels go through torch
L2_EPS = 1e-6


def kda_prologue(
    x_BTC: Three,
    taps_CJ: Three,
    tail_NPX: Tensor | None,
    z_BTC: Tensor | None,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_C: Tensor,
    lower_bound: float | None,
    *,
    starts: Sequence[int] | Tensor | None = None,
    counts: Sequence[int] | Tensor | None = None,
    native: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q_BTHK, k_BTHK, v_BTHK, g_BTHK, beta_BTH, tail_NPX), C = H * K channels each, X = 3 * C of them.

    x, taps      projections and convolution weights of q, k, v
    tail         the P = J - 1 inputs in front of each sequence, q's, k's and v's side by side; None: zeros. Not
                 changed; the last P of each sequence come back.
    z            decay logits; None: no decay (g = 0)
    lower_bound  of g; None: the unbounded softplus decay
    starts, counts   as in `ops.kda.kda`; positions of no sequence get zeros everywhere, which the scan passes over
    """
    B, T, H = b_BTH.shape
    sequences = Sequences.of(B, T, starts, counts)
    K, J = x_BTC[0].shape[-1] // H, taps_CJ[0].shape[-1]
    everything = (*x_BTC, *taps_CJ, z_BTC, b_BTH, A_log_H, dt_bias_C, tail_NPX)
    alike = all(t is None or t.dtype == b_BTH.dtype for t in everything)
    bounded = lower_bound is not None or z_BTC is None
    if not (native and bounded and J == TAPS and alike and fits(b_BTH, K)):
        return _torch(x_BTC, taps_CJ, tail_NPX, z_BTC, b_BTH, A_log_H, dt_bias_C, lower_bound, sequences)
    lower = 0.0 if lower_bound is None else lower_bound
    if wants_gradient(*everything):
        return _Prologue.apply(*everything, lower, sequences)  # type: ignore[return-value]
    return _forward(_Inputs(*everything, lower, sequences))


def _torch(
    x_BTC: Three,
    taps_CJ: Three,
    tail_NPX: Tensor | None,
    z_BTC: Tensor | None,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_C: Tensor,
    lower_bound: float | None,
    sequences: Sequences,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The definition, in differentiable torch."""
    taps = torch.cat(taps_CJ)
    mixed = sequences.pad(torch.cat(x_BTC, -1))
    (N, L, X), J = mixed.shape, taps.shape[-1]
    before = mixed.new_zeros(N, J - 1, X) if tail_NPX is None else tail_NPX
    joined = torch.cat([before, mixed], 1)
    y = joined[:, :L] * taps[:, 0]
    for j in range(1, J):
        y = torch.addcmul(y, joined[:, j : j + L], taps[:, j])
    last = sequences.counts_N.to(mixed.device)[:, None] + torch.arange(J - 1, device=mixed.device)
    tail = joined[torch.arange(N, device=mixed.device)[:, None], last]
    H = b_BTH.shape[-1]
    q, k, v = sequences.unpad(F.silu(y)).unflatten(-1, (3, H, -1)).unbind(2)
    g = torch.zeros_like(q) if z_BTC is None else decay(z_BTC + dt_bias_C, A_log_H, lower_bound).unflatten(-1, (H, -1))
    beta = torch.sigmoid(b_BTH)
    if not sequences.covers:
        g, beta = (sequences.unpad(sequences.pad(x)) for x in (g, beta))
    return l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k), v, g, beta, tail


def decay(z_BTC: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    """g <= 0 of biased decay logits."""
    a = A_log_H.exp().repeat_interleave(z_BTC.shape[-1] // len(A_log_H))
    return -a * F.softplus(z_BTC) if lower_bound is None else lower_bound * torch.sigmoid(a * z_BTC)


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


# ------------------------------------------------------------------------------------------------------- the C kernels


class _Inputs:
    """The first words of both C structs, and the tensors that must outlive the call."""

    def __init__(
        self,
        *tensors_and_rest: Any,
    ):
        *tensors, lower, self.sequences = tensors_and_rest
        q, k, v, *taps, z, b, A_log, bias, tail = tensors
        self.x = [dense(t) for t in (q, k, v)]
        self.taps = torch.stack([t.T for t in taps]).contiguous()  # [3, J, C]
        self.z, self.b = (None if t is None else dense(t) for t in (z, b))
        self.tail = None if tail is None else tail.contiguous()
        self.B, self.T, self.H = b.shape
        self.C = q.shape[-1]
        self.K = self.C // self.H
        self.a, self.bias = A_log.exp(), bias.contiguous()
        self.constants = torch.tensor([lower, self.K**-0.5], dtype=b.dtype)

    def words(self, *outputs: Tensor) -> tuple[int, ...]:
        """outputs: q, k, v, g, beta, tail, or none (the backward pass writes elsewhere)."""
        z_strides = (0, 0) if self.z is None else self.z.stride()[:2]
        assert self.b is not None
        return (
            *(t.data_ptr() for t in self.x),
            *(t.stride(0) for t in self.x),
            *(t.stride(1) for t in self.x),
            *(address(t) for t in (self.taps, self.tail, self.z, self.b)),
            *(*z_strides, *self.b.stride()[:2]),
            *(address(t) for t in (self.a, self.bias, self.constants, self.sequences.table_N3)),
            *([t.data_ptr() for t in outputs] or [0] * 6),
            *(len(self.sequences), self.T, self.H, self.K, torch.get_num_threads()),
        )


def _forward(inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = inputs.x[0]
    make = like.new_empty if inputs.sequences.covers else like.new_zeros
    wide = (inputs.B, inputs.T, inputs.H, inputs.K)
    q, k, v, g = (make(wide) for _ in range(4))
    beta, tail = make(wide[:3]), like.new_empty(len(inputs.sequences), TAPS - 1, 3 * inputs.C)
    call("kda_prologue", like.dtype, *inputs.words(q, k, v, g, beta, tail))
    return q, k, v, g, beta, tail


class _Prologue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any):
        *tensors, ctx.lower, ctx.sequences = args
        ctx.save_for_backward(*tensors)
        return _forward(_Inputs(*args))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # type: ignore[override]
        inputs = _Inputs(*ctx.saved_tensors, ctx.lower, ctx.sequences)
        like = inputs.x[0]
        make = like.new_empty if inputs.sequences.covers else like.new_zeros
        narrow = (inputs.B, inputs.T, inputs.C)
        dq, dk, dv = (make(narrow) for _ in range(3))
        dz = None if inputs.z is None else make(narrow)
        db = make((inputs.B, inputs.T, inputs.H))
        dtail = None if inputs.tail is None else torch.empty_like(inputs.tail)
        dtaps = torch.zeros_like(inputs.taps)
        dA, dbias = torch.zeros_like(inputs.a), torch.zeros_like(inputs.bias)
        given = [t.contiguous() for t in grads]
        call(
            "kda_prologue_back",
            like.dtype,
            *inputs.words(),
            *(t.data_ptr() for t in given),
            *(address(t) for t in (dq, dk, dv, dtaps, dtail, dz, db, dA, dbias)),
        )
        return dq, dk, dv, *dtaps.mT.unbind(0), dz, db, dA, dbias, dtail, None, None
