"""KDA a chunk at a time in plain torch: any device, any float type, gradients by autograd.

The WY form (k3 section 2.2): with P the cumulative decay inside a chunk and S the state in front of it,

    X = strict_lower((k P)(k / P)^T)     A = lower((q P)(k / P)^T)
    (I + beta X) [W | U] = [beta k P | beta v]      vt = U - W S
    o = (q P) S + A vt                              S' = P_end S + (k P_end / P)^T vt

Three things keep it exact (kernels section 1.2). The triangular system is solved by forward substitution: powers of X
cancel catastrophically when keys repeat. P is a product of decays, never the exponential of a difference of sums, which
loses a weak gate behind strong ones. P and 1 / P are shifted by a constant, half of the largest possible span, so both
stay within e^+-40. A decay without a floor has no such constant: there each key's decay is multiplied up on its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 16
BLOCK = 256  # positions worked on at once: what they need stays in the processor's cache


def kda_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    lower_bound: float | None = -5.0,
) -> tuple[Tensor, Tensor]:
    """(o_BTHV, state_BHKV) of `kda_recurrent`. g must lie in [lower_bound, 0]; None: anywhere at or below 0."""
    S, outputs = state_BHKV.flatten(0, 1), []
    for at in range(0, q_BTHK.shape[1], BLOCK):
        piece = [x[:, at : at + BLOCK] for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH.unsqueeze(-1))]
        o, S = _block(piece, S, lower_bound)
        outputs.append(o)
    o = torch.cat(outputs, 1) if outputs else v_BTHV.clone()
    return o, S.view_as(state_BHKV)


def _block(piece: list[Tensor], S: Tensor, lower: float | None) -> tuple[Tensor, Tensor]:
    """The same for one block: q, k, v, g and beta [B, T, H, .]; S [B*H, K, V]."""
    B, T, H, K = piece[0].shape
    q, k, v, g, beta = map(_chunks, piece)
    XA, start, end = _bounded(q, k, g, lower) if lower is not None else _unbounded(q, k, g)
    X, A = XA.split([CHUNK, CHUNK], -2)
    A = A.tril()
    WU = _forward_substitution(beta * X, torch.cat([beta * (k * start), beta * v], -1))
    W, U = WU.split([K, v.shape[-1]], -1)
    reads, kt, whole = torch.cat([W, q * start], -2), (k * end).mT, g.sum(-2, keepdim=True).exp().mT
    outputs = []
    for n in range(len(q)):
        WS, qS = (reads[n] @ S).split([CHUNK, CHUNK], -2)
        vt = U[n] - WS
        outputs.append(torch.baddbmm(qS, A[n], vt))
        S = torch.baddbmm(whole[n] * S, kt[n], vt)
    o = torch.stack(outputs).unflatten(1, (B, H)).permute(1, 0, 3, 2, 4)  # [B, N, C, H, V]
    return o.flatten(1, 2)[:, :T], S


def _chunks(x_BTHK: Tensor) -> Tensor:
    """[B, T, H, K] -> [N, B*H, C, K]; the tail is zero-padded, which is a no-op for the state."""
    B, T, H, K = x_BTHK.shape
    N = -(-T // CHUNK)
    if pad := N * CHUNK - T:
        x_BTHK = torch.nn.functional.pad(x_BTHK, (0, 0, 0, 0, 0, pad))
    return x_BTHK.reshape(B, N, CHUNK, H, K).permute(1, 0, 3, 2, 4).reshape(N, B * H, CHUNK, K)


def _bounded(q: Tensor, k: Tensor, g: Tensor, lower: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each chunk: X over A [N, Z, 2C, C] with garbage in their upper triangles, and the decay [N, Z, C, K] from its
    start to each position and from each position to its end.
    """
    shift = math.exp(-lower * CHUNK / 2)
    P = g.exp().cumprod(-2)
    decay = P * shift
    inverse = decay.reciprocal()
    XA = (torch.cat([k, q], -2) * torch.cat([decay, decay], -2)) @ (k * inverse).mT
    return XA, P, inverse * decay[..., -1:, :]


def _unbounded(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_bounded` for any g <= 0: each key carries its own decay from position to position, so no factor exceeds 1. Sums
    in float64: a strong decay must not blur the weak ones that follow it.
    """
    G, e = g.double().cumsum(-2), g.exp()
    keys, lines = k[..., :0, :], []
    for i in range(CHUNK):
        here = slice(i, i + 1)
        keys = torch.cat([keys * e[..., here, :], k[..., here, :]], -2)
        line = torch.cat([k[..., here, :], q[..., here, :]], -2) @ keys.mT
        lines.append(torch.nn.functional.pad(line, (0, CHUNK - 1 - i)))
    XA = torch.stack(lines, -2).flatten(-3, -2)
    return XA, G.to(g.dtype).exp(), (G[..., -1:, :] - G).to(g.dtype).exp()


def _forward_substitution(L: Tensor, right: Tensor) -> Tensor:
    """x of (I + strict_lower(L)) x = right. Solved as x^T (I + L)^T = right^T, whose layout LAPACK takes as it is."""
    return torch.linalg.solve_triangular(L.mT, right.mT, upper=True, left=False, unitriangular=True).mT
