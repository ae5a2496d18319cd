"""Kimi Delta Attention: a gated delta rule with one decay per key channel (Kimi K3 report, section 2).

    S_t = Diag(exp g_t) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = S_t^T q_t

`kda_recurrent` is the definition; law 1 holds everything else equal to it. `kda` is what models call: C kernels on the
CPU (kda_native), flash-linear-attention on a GPU (kda_fla), chunks in torch (kda_chunk) for the rest. A position with
beta = 0 and g = 0 leaves the state untouched, which is how padding is passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nonet.ops import kda_fla, kda_native
from nonet.ops.kda_chunk import kda_chunk
from nonet.ops.kda_epilogue import kda_epilogue
from nonet.ops.kda_native import CHUNK
from nonet.ops.kda_prologue import kda_prologue
from nonet.ops.sequences import Sequences

__all__ = ["CHUNK", "kda", "kda_chunk", "kda_epilogue", "kda_prologue", "kda_recurrent", "kda_step_"]

STRONGEST = -5.0  # the lowest bound under which a chunk's decays keep clear of overflow and denormals


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


def kda(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    state_NHKV: Tensor | None,
    lower_bound: float | None,
    *,
    starts: Sequence[int] | Tensor | None = None,
    counts: Sequence[int] | Tensor | None = None,
    export: Sequence[tuple[int, int]] | Tensor | None = None,
    native: bool = True,
) -> tuple[Tensor, ...]:
    """(o_BTHV, state_NHKV), and with `export` also exported_EHKV, by the fastest way this machine has.

    state_NHKV   in front of each sequence; None: zeros. Not changed.
    lower_bound  g lies in [lower_bound, 0], and lower_bound in [-5, 0); None: g <= 0 without a floor (Kimi-Linear).
    starts       where sequences begin in the B * T flattened positions (see Sequences.of); None: one a row.
    counts       how many positions of each sequence are real; o is 0 behind them, the state is that of the last one.
    export       (sequence, position) pairs: the state after so many positions of this call, a multiple of 16. Bitwise
                 the state that a call ending there returns, and a call that continues from it gives the same bits as
                 one call (C kernels). Without gradient.
    native       False: leave the C kernels alone (NONET_NATIVE=0 does so everywhere).
    """
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    sequences = Sequences.of(B, T, starts, counts)
    wanted_E2 = _check(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_NHKV, lower_bound, sequences, export)
    state_dtype = v_BTHV.dtype if state_NHKV is None else state_NHKV.dtype
    if kda_fla.fits(q_BTHK, K):
        scan: _Scan = kda_fla.scan
        args = [q_BTHK, k_BTHK, v_BTHV, g_BTHK.float(), beta_BTH.float()]
        state = None if state_NHKV is None else state_NHKV.float()
    else:
        scan = kda_chunk
        wide = torch.promote_types(v_BTHV.dtype, torch.float32)
        args = [x.to(wide) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)]
        state = None if state_NHKV is None else state_NHKV.to(wide)
    if native and lower_bound is not None and kda_native.fits(args[0], K, V):
        o, end, exported = kda_native.scan(*args, state_NHKV=state, sequences=sequences, wanted_E2=wanted_E2)
    else:
        if state is None:
            state = args[3].new_zeros(len(sequences), H, K, V)
        o, end, exported = _in_pieces(scan, args, state, lower_bound, sequences, wanted_E2)
    out = o.to(v_BTHV.dtype), end.to(state_dtype), exported.to(state_dtype)
    return out[:2] if export is None else out


_Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


def _in_pieces(
    scan: _Scan,
    args: list[Tensor],
    state: Tensor,
    lower_bound: float | None,
    sequences: Sequences,
    wanted_E2: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences as padded rows through a scan that knows only rows; stops where a state is wanted."""
    q, k, v, g, beta = (sequences.pad(x) for x in args)
    if not sequences.covers or not sequences.whole:
        behind = ~sequences.valid_NL.to(q.device)
        g, beta = g.masked_fill(behind[:, :, None, None], 0), beta.masked_fill(behind[:, :, None], 0)
    length = q.shape[1]
    stops = sorted({0, length, *wanted_E2[:, 1].tolist()})
    states, outputs = {0: state}, []
    for a, b in pairwise(stops):
        o, state = scan(q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], beta[:, a:b], state, lower_bound)
        states[b] = state
        outputs.append(o)
    picked = [states[at][n] for n, at in wanted_E2.tolist()]
    exported = torch.stack(picked).detach() if picked else state.new_empty(0, *state.shape[1:])
    o = torch.cat(outputs, 1) if outputs else v  # no sequence has a position
    return sequences.unpad(o), state, exported


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    lower_bound: float | None,
    sequences: Sequences,
    export: Sequence[tuple[int, int]] | Tensor | None,
) -> Tensor:
    """Refuse what does not fit together; the exports as a tensor [E, 2]."""
    B, T, H, K = q.shape
    V, N = v.shape[-1], len(sequences)
    for name, x, shape in (("k", k, (B, T, H, K)), ("g", g, (B, T, H, K)), ("v", v, (B, T, H, V)),
                           ("beta", beta, (B, T, H)), ("state", state, (N, H, K, V))):  # fmt: skip
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} is {list(x.shape)}: with q {list(q.shape)} it must be {list(shape)}")
    if lower_bound is not None and not STRONGEST <= lower_bound < 0:
        raise ValueError(f"lower_bound {lower_bound}: must lie in [{STRONGEST:g}, 0), or be None for no floor")
    if export is None:
        return torch.empty(0, 2, dtype=torch.long)
    wanted_E2 = torch.as_tensor(export, dtype=torch.long).cpu().reshape(-1, 2).contiguous()
    n, at = wanted_E2.unbind(1)
    if bool(((n < 0) | (n >= N)).any()) or bool(((at % CHUNK != 0) | (at < 0)).any()):
        raise ValueError(f"export {wanted_E2.tolist()[:4]}: needs (sequence below {N}, multiple of {CHUNK}) pairs")
    if bool((at > sequences.counts_N[n]).any()):
        ends = sequences.counts_N[n].tolist()[:4]
        raise ValueError(f"export {wanted_E2.tolist()[:4]}: behind the ends of these sequences, {ends}")
    return wanted_E2


def kda_step_(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BHK: Tensor,
    beta_BH: Tensor,
    state_BHKV: Tensor,
    native: bool = True,
) -> Tensor:
    """One position of `kda_recurrent`, updating `state_BHKV` in place. Returns o_BHV."""
    if native:
        o_BHV = kda_native.step_(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_BHKV)
        if o_BHV is not None:
            return o_BHV
    state_BHKV.mul_(g_BHK.exp().unsqueeze(-1))
    read_BH1V = k_BHK.unsqueeze(-2) @ state_BHKV
    write_BHV = (v_BHV - read_BH1V.squeeze(-2)).mul_(beta_BH.unsqueeze(-1))
    B, H, K, V = state_BHKV.shape
    state_BHKV.view(B * H, K, V).baddbmm_(k_BHK.reshape(B * H, K, 1), write_BHV.reshape(B * H, 1, V))
    return (q_BHK.unsqueeze(-2) @ state_BHKV).squeeze(-2)
