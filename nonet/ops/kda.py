"""Kimi Delta Attention: a gated delta rule with one decay per key channel (Kimi K3 report, section 2).

    S_t = Diag(exp g_t) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = S_t^T q_t

`kda_recurrent` is the definition. `kda_chunk` is the same map computed a chunk at a time with matrix products (forward;
backward by autograd); law 1 holds them equal. Both take and return the state explicitly, and a position with beta = 0
and g = 0 leaves it untouched, which is how padding is passed through.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16


def kda_recurrent(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, beta_BTH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token. q is already scaled, q and k already normalised, g = log decay <= 0. Returns (o_BTHV,
    state_BHKV).
    """
    outputs = []
    S = state_BHKV
    for t in range(q_BTHK.shape[1]):
        S = S * g_BTHK[:, t].exp().unsqueeze(-1)
        k = k_BTHK[:, t]
        read_BHV = torch.einsum("bhk,bhkv->bhv", k, S)
        write_BHV = beta_BTH[:, t].unsqueeze(-1) * (v_BTHV[:, t] - read_BHV)
        S = S + k.unsqueeze(-1) * write_BHV.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_BTHK[:, t], S))
    return torch.stack(outputs, 1), S


def kda_step_(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, g_BHK: Tensor, beta_BH: Tensor, state_BHKV: Tensor
) -> Tensor:
    """One position of `kda_recurrent`, updating `state_BHKV` in place. Returns o_BHV."""
    state_BHKV.mul_(g_BHK.exp().unsqueeze(-1))
    read_BH1V = k_BHK.unsqueeze(-2) @ state_BHKV
    write_BHV = (v_BHV - read_BH1V.squeeze(-2)).mul_(beta_BH.unsqueeze(-1))
    B, H, K, V = state_BHKV.shape
    state_BHKV.view(B * H, K, V).baddbmm_(k_BHK.reshape(B * H, K, 1), write_BHV.reshape(B * H, 1, V))
    return (q_BHK.unsqueeze(-2) @ state_BHKV).squeeze(-2)


def kda_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    lower_bound: float = -5.0,
) -> tuple[Tensor, Tensor]:
    """Chunks of 16 positions as dense matrix products; g must lie in [lower_bound, 0].

    Inside a chunk the cumulative log decay G spans at most 16 * |lower_bound| = 80, so exp(G) and exp(-G), both shifted
    by half that span, stay within e^40 of 1: no overflow and no denormals in float32. Returns (o_BTHV, state_BHKV).
    """
    B, T, H, K = q_BTHK.shape
    N = -(-T // CHUNK)
    q, k, v, g = (_chunks(x, N) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK))
    beta = _chunks(beta_BTH.unsqueeze(-1), N)
    half_span = -lower_bound * CHUNK / 2
    G = g.cumsum(-2)
    decay, inverse = (G + half_span).exp(), (-G - half_span).exp()
    qh, kh, kb = q * decay, k * decay, k * inverse
    total = G[..., -1:, :]
    kt = k * (total - G).exp()
    L = (beta * (kh @ kb.transpose(-1, -2))).tril(-1)
    M = _inverse_unit_lower(L)
    plain = G.exp()
    WU = M @ torch.cat([beta * (k * plain), beta * v], -1)
    W, U = WU[..., :K], WU[..., K:]
    A = (qh @ kb.transpose(-1, -2)).tril()
    qd, end = q * plain, total.exp().transpose(-1, -2)
    S, outputs = state_BHKV, []
    for n in range(N):
        vt = U[:, :, n] - W[:, :, n] @ S
        outputs.append(qd[:, :, n] @ S + A[:, :, n] @ vt)
        S = end[:, :, n] * S + kt[:, :, n].transpose(-1, -2) @ vt
    o = torch.stack(outputs, 2).reshape(B, H, N * CHUNK, -1)[:, :, :T]
    return o.transpose(1, 2), S


def _chunks(x_BTHK: Tensor, N: int) -> Tensor:
    """[B, T, H, K] -> [B, H, N, C, K]; the tail is zero-padded, which is a no-op for the state."""
    B, T, H, K = x_BTHK.shape
    if pad := N * CHUNK - T:
        x_BTHK = torch.nn.functional.pad(x_BTHK, (0, 0, 0, 0, 0, pad))
    return x_BTHK.view(B, N, CHUNK, H, K).permute(0, 3, 1, 2, 4)


def _inverse_unit_lower(L: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower triangular L of size 16: (I - L)(I + L^2)(I + L^4)(I + L^8), exact since L^16 = 0.
    """
    I = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    L2 = L @ L
    L4 = L2 @ L2
    return (I - L) @ (I + L2) @ ((I + L4) @ (I + L4 @ L4))
