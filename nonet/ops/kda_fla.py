"""KDA through flash-linear-attention's Triton kernels, for tensors on a GPU where that package is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def fits(x: Tensor, K: int) -> bool:
    return x.device.type == "cuda" and K <= 256 and _installed()


@cache
def _installed() -> bool:
    return find_spec("fla") is not None and find_spec("triton") is not None


def scan(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """(o_BTHV, state_BHKV) of `ops.kda_chunk.kda_chunk`."""
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]

    o, state = chunk_kda(
        q_BTHK.contiguous(),
        k_BTHK.contiguous(),
        v_BTHV.contiguous(),
        g_BTHK.contiguous(),
        beta_BTH.contiguous(),
        scale=1.0,  # q comes scaled
        initial_state=state_BHKV.float().contiguous(),
        output_final_state=True,
        safe_gate=lower_bound is not None,  # the faster diagonal, legal because g >= lower_bound >= -5
        lower_bound=lower_bound,
    )
    return o, state.to(state_BHKV.dtype)
