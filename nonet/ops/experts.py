"""Routed experts: every token through its own few gated feed-forwards (Kimi K3 report, section 2; k3 section 1.5).

    y_n = sum_j weight_nj * W2_e act(W1_e x_n, W3_e x_n),  e = chosen_nj

`experts_loop` is the definition. `experts_grouped` sorts tokens by expert and multiplies each expert's share in one
grouped product (float32, bfloat16 and float16; torch has no float64 kernel). `experts` picks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor, Tensor], Tensor]  # (gate, up) -> hidden


def experts(
    x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor, w1_EFD: Tensor, w3_EFD: Tensor, w2_EDF: Tensor, act: Activation
) -> Tensor:
    """y_ND. chosen_NK: distinct expert ids of each token; weight_NK: their mixing weights."""
    step = 16 // x_ND.element_size()  # torch's grouped product wants rows that are multiples of 16 bytes
    aligned = w1_EFD.shape[1] % step == 0 and w1_EFD.shape[2] % step == 0
    grouped = aligned and x_ND.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return (experts_grouped if grouped else experts_loop)(x_ND, chosen_NK, weight_NK, w1_EFD, w3_EFD, w2_EDF, act)


def experts_loop(
    x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor, w1_EFD: Tensor, w3_EFD: Tensor, w2_EDF: Tensor, act: Activation
) -> Tensor:
    """One expert at a time, each on the tokens that chose it."""
    y_ND = torch.zeros_like(x_ND)
    for e in chosen_NK.unique().tolist():
        rows, rank = (chosen_NK == e).nonzero(as_tuple=True)
        x = x_ND[rows]
        out = F.linear(act(F.linear(x, w1_EFD[e]), F.linear(x, w3_EFD[e])), w2_EDF[e])
        y_ND = y_ND.index_add(0, rows, out * weight_NK[rows, rank].unsqueeze(1))
    return y_ND


def experts_grouped(
    x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor, w1_EFD: Tensor, w3_EFD: Tensor, w2_EDF: Tensor, act: Activation
) -> Tensor:
    """Sort by expert, three grouped products, undo the sort, sum over ranks in rank order (so a token's sum is always
    taken in the same order).
    """
    N, K = chosen_NK.shape
    order = chosen_NK.flatten().argsort(stable=True)
    counts = torch.bincount(chosen_NK.flatten(), minlength=len(w1_EFD))
    ends = counts.cumsum(0).to(torch.int32)
    x = x_ND[order // K]
    hidden = act(_grouped(x, w1_EFD, ends), _grouped(x, w3_EFD, ends))
    out = _grouped(hidden, w2_EDF, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(N * K, device=order.device)
    return (out[back].view(N, K, -1) * weight_NK.unsqueeze(-1)).sum(1)


def _grouped(x_ND: Tensor, w_EFD: Tensor, ends_E: Tensor) -> Tensor:
    return F.grouped_mm(x_ND.contiguous(), w_EFD.transpose(1, 2), offs=ends_E)
