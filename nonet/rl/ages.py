"""What an update did to tokens by their age: how many policy versions lie between sampling and training.

A row an age, in the `rl_step` event: tokens, quantiles of rho = pi / mu, the share that the objective clipped or
masked, and the share of the gradient, |dL / dlog pi| summed over the age's tokens over the sum of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

QUANTILES = {"ratio_p05": 0.05, "ratio_p50": 0.5, "ratio_p95": 0.95}


class Ages:
    """Columns over all tokens of a step; `rows` sorts them by age."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, ...]] = []

    def add(self, age_N: Tensor, ratio_N: Tensor, clipped_N: Tensor, pull_N: Tensor) -> None:
        self._parts.append((age_N, ratio_N, clipped_N, pull_N))

    def rows(self) -> list[dict[str, Any]]:
        if not self._parts:
            return []
        age_N, ratio_N, clipped_N, pull_N = (torch.cat(column) for column in zip(*self._parts, strict=True))
        total = float(pull_N.sum())
        out = []
        for age in age_N.unique().tolist():
            where_N = age_N == age
            quantiles = torch.quantile(ratio_N[where_N], torch.tensor(list(QUANTILES.values()))).tolist()
            out.append({
                "age": age, "tokens": int(where_N.sum()), **dict(zip(QUANTILES, quantiles, strict=True)),
                "clipped": float(clipped_N[where_N].float().mean()),
                "grad_share": float(pull_N[where_N].sum()) / total if total else 0.0,
            })  # fmt: skip
        return out
