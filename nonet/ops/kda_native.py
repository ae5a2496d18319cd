"""KDA through the C kernels of `nonet.native`: the scan with its gradients, and the single step.

The C side takes one array of 64-bit words (addresses and integers) per call; the order of the words is that of the
structs in native/kda_*.h. float32, and float64 for checks; CPU; key and value widths multiples of 16 up to 256.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nonet import native
from nonet.ops.sequences import Sequences

CHUNK, KEEP = 16, 4  # as in native/kda_chunk.h and kda_forward.h
_SUFFIX = {torch.float32: "_f32", torch.float64: "_f64"}


def fits(x: Tensor, *widths: int) -> bool:
    """Whether the C kernels take tensors like x, with these widths, on this machine."""
    fit = x.device.type == "cpu" and x.dtype in _SUFFIX and all(w % 16 == 0 and 0 < w <= 256 for w in widths)
    return fit and native.library() is not None


def call(name: str, dtype: torch.dtype, *words: int) -> None:
    """Call a C function that takes one struct of 64-bit words and returns 0, or 1 when memory ran out."""
    library = native.library()
    if library is None:
        raise AssertionError(f"{name}: no native library ({native.reason()}); ask `fits` first")
    if getattr(library, name + _SUFFIX[dtype])(struct.pack(f"{len(words)}q", *words)):
        raise MemoryError(f"{name}: no memory for the scratch of {torch.get_num_threads()} threads")


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, which is all that the kernels ask of their inputs."""
    return x if x.stride(-1) == 1 else x.contiguous()


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def scan(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    state_NHKV: Tensor | None,
    sequences: Sequences,
    wanted_E2: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o_BTHV, state_NHKV, exported_EHKV) of `ops.kda.kda`; exported states carry no gradient."""
    q, k, v, g = (dense(x) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK))
    if wants_gradient(q, k, v, g, beta_BTH, state_NHKV):
        return _Scan.apply(q, k, v, g, beta_BTH, state_NHKV, sequences, wanted_E2)  # type: ignore[return-value]
    return _forward(q, k, v, g, beta_BTH, state_NHKV, sequences, wanted_E2, None)


class _Kept:
    """What the backward pass needs from the forward pass beside its inputs."""

    def __init__(self, v_BTHV: Tensor, K: int, sequences: Sequences):
        blocks_N = -(-sequences.counts_N // (CHUNK * KEEP))
        self.first_N = (blocks_N.cumsum(0) - blocks_N).contiguous()
        self.w_BTHV = torch.empty_like(v_BTHV, memory_format=torch.contiguous_format)
        H, V = v_BTHV.shape[2:]
        size = K * -(-V // 32) * 32 + KEEP * 2 * CHUNK * CHUNK  # kept_size in native/kda_forward.h
        self.states_MHX = v_BTHV.new_empty(int(blocks_N.sum()), H, size)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    sequences: Sequences,
    wanted_E2: Tensor,
    kept: _Kept | None,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    V, N = v.shape[-1], len(sequences)
    state = None if state is None else state.contiguous()
    o = q.new_empty(B, T, H, V) if sequences.covers else q.new_zeros(B, T, H, V)
    end, exported = q.new_empty(N, H, K, V), q.new_empty(len(wanted_E2), H, K, V)
    call(
        "kda_forward",
        q.dtype,
        *(x.data_ptr() for x in (q, k, v, g, beta)),
        *(s for x in (q, k, v, g, beta) for s in x.stride()[:3]),
        *(address(x) for x in (sequences.table_N3, state, o, end)),
        *((0, 0, 0) if kept is None else (address(x) for x in (kept.w_BTHV, kept.states_MHX, kept.first_N))),
        *(wanted_E2.data_ptr(), exported.data_ptr()),
        *(N, T, H, K, V, len(wanted_E2), torch.get_num_threads()),
    )
    return o, end, exported


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, state, sequences: Sequences, wanted_E2: Tensor):
        kept = _Kept(v, q.shape[-1], sequences)
        o, end, exported = _forward(q, k, v, g, beta, state, sequences, wanted_E2, kept)
        ctx.save_for_backward(q, k, g, beta, kept.w_BTHV, kept.states_MHX, kept.first_N)
        ctx.sequences, ctx.has_state = sequences, state is not None
        ctx.mark_non_differentiable(exported)
        ctx.set_materialize_grads(False)
        return o, end, exported

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_end: Tensor | None, _: Any):  # type: ignore[override]
        q, k, g, beta, w, states, first = ctx.saved_tensors
        sequences: Sequences = ctx.sequences
        B, T, H, K = q.shape
        V, N = w.shape[-1], len(sequences)
        d_o = w.new_zeros(w.shape) if d_o is None else d_o.contiguous()
        d_end = None if d_end is None else d_end.contiguous()
        make = q.new_empty if sequences.covers else q.new_zeros
        dq, dk, dg = (make(B, T, H, K) for _ in range(3))
        dv, dbeta, d_state = make(B, T, H, V), make(B, T, H), q.new_empty(N, H, K, V)
        call(
            "kda_backward",
            q.dtype,
            *(x.data_ptr() for x in (q, k, g, beta)),
            *(s for x in (q, k, g, beta) for s in x.stride()[:3]),
            *(address(x) for x in (sequences.table_N3, w, states, first, d_o, d_end)),
            *(x.data_ptr() for x in (dq, dk, dv, dg, dbeta, d_state)),
            *(N, T, H, K, V, torch.get_num_threads()),
        )
        return dq, dk, dv, dg, dbeta, d_state if ctx.has_state else None, None, None


_pack_step = struct.Struct("22q").pack
_STEPS = {torch.float32: "kda_step_f32", torch.float64: "kda_step_f64"}


def step_(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, g_BHK: Tensor, beta_BH: Tensor, state_BHKV: Tensor
) -> Tensor | None:
    """`ops.kda.kda_step_` in two reads and one write of the state; None if these tensors are not for C."""
    found = step_call(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_BHKV)
    if found is None:
        return None
    run, words, o_BHV = found
    run(words)
    return o_BHV


def step_call(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Callable[[bytes], int], bytes, Tensor] | None:
    """(C function, its argument, o_BHV it fills); None if these tensors are not for C.

    Calling again steps again, on what the same tensors then hold; they must be kept alive, o as well. Written for few
    Python operations: at batch 1 they cost half as much as the arithmetic.
    """
    kind, library = S.dtype, native.library()
    B, H, K, V = S.shape
    if library is None or kind not in _STEPS or K % 16 or V % 16 or K > 256 or V > 256:
        return None
    if not (q.dtype is k.dtype is v.dtype is g.dtype is beta.dtype is kind and S.is_contiguous() and S.is_cpu):
        return None
    if not (q.shape == k.shape == g.shape == (B, H, K) and v.shape == (B, H, V) and beta.shape == (B, H)):
        return None  # torch may broadcast it, or say what is wrong
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, S)):
        return None
    (qb, qh, q1), (kb, kh, k1), (vb, vh, v1), (gb, gh, g1) = q.stride(), k.stride(), v.stride(), g.stride()
    if not q1 == k1 == v1 == g1 == 1:
        return None
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    words = _pack_step(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr()),
        *(qb, qh, kb, kh, vb, vh, gb, gh, *beta.stride()),
        *(S.data_ptr(), o.data_ptr(), B, H, K, V, torch.get_num_threads()),
    )
    return getattr(library, _STEPS[kind]), words, o
