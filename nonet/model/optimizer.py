"""Muon for the matrices inside blocks, AdamW for everything else: K3's split, with torch's own Muon.

Muon orthogonalises each matrix's momentum (Newton-Schulz), scaled to the root-mean-square an AdamW step has, so one
learning rate serves both. Embeddings, the head, norms, biases, convolutions and per-head scalars stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Named = tuple[str, nn.Parameter]


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """True for weights that map hidden vectors to hidden vectors."""
    return p.ndim == 2 and not name.startswith(("embed_tokens", "lm_head"))


class Optimizer:
    """AdamW over all parameters (kind "adamw"), or Muon over matrices and AdamW over the rest (kind "muon")."""

    def __init__(self, named: Iterable[Named], kind: str, lr: float, betas: tuple[float, float], weight_decay: float):
        named = list(named)
        matrices = [p for n, p in named if kind == "muon" and is_matrix(n, p)]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.parameters = matrices + rest
        if len({id(p) for p in self.parameters}) != len(named):
            raise AssertionError("optimiser groups do not partition the parameters")
        self.parts: list[torch.optim.Optimizer] = []
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay, fused=True))
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)

    def step(self, lr: float, grad_clip: float) -> float:
        """Clip, update, clear. Returns the gradient's norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, grad_clip))
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
