"""Quantisation-aware training: forward sees the quantised tensor, backward passes the gradient straight through.

`QuantConfig` is the one table that says which tensors are quantised and how. It is Kimi K3's: weights of routed experts
MXFP4, the inputs of both of their matrix products MXFP8, everything else untouched. Scales are taken anew from every
tensor it is given, so training, generation and an exported checkpoint agree as long as all three ask here.

    quant = QuantConfig()
    y = F.linear(quant.apply(x, "routed_expert_inputs", "x"), quant.apply(w, "routed_expert_weights", "w"))

Quantising after training is `w.copy_(quant.apply(w, "routed_expert_weights", "w"))` under `torch.no_grad()`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from nonet.config import Config
from nonet.quant.formats import Format, Rule, saturated
from nonet.quant.mx import fake

Kind = Literal["routed_expert_weights", "routed_expert_inputs", "other"]
Choice = Literal["none", "mxfp4", "mxfp8", "mxfp8_e5m2"]


class QuantConfig(Config):
    """Formats by kind of tensor. "other" (attention, latent projections, shared experts, router, norms, embeddings,
    head) has no field: it is never quantised.
    """

    routed_expert_weights: Choice = "mxfp4"
    routed_expert_inputs: Choice = "mxfp8"
    rule: Rule = "floor"  # the report does not say; the released codes fit floor and even
    zero_saturated: bool = False  # drop the gradient of elements beyond the largest value of their block

    def format_of(self, kind: Kind) -> Format | None:
        """The format of tensors of this kind; None where they stay as they are."""
        choice: Choice = "none" if kind == "other" else getattr(self, kind)
        return None if choice == "none" else choice

    def apply(self, x: Tensor, kind: Kind, name: str) -> Tensor:
        """x [..., K] quantised along K, with a straight-through gradient; x itself where the table says "none".

        `name` is what the refusal of a NaN or an Inf calls the tensor.
        """
        fmt = self.format_of(kind)
        return x if fmt is None else fake_quant(x, fmt, self.rule, name, self.zero_saturated)


UNQUANTISED = QuantConfig(routed_expert_weights="none", routed_expert_inputs="none")


def fake_quant(
    x: Tensor,
    fmt: Format = "mxfp4",
    rule: Rule = "floor",
    name: str = "a tensor",
    zero_saturated: bool = False,
) -> Tensor:
    """`mx.fake` with the gradient of the identity, or, with `zero_saturated`, of clipping at the largest value."""
    return _StraightThrough.apply(x, fmt, rule, name, zero_saturated)  # pyright: ignore[reportReturnType]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format, rule: Rule, name: str, zero_saturated: bool) -> Tensor:
        out = fake(x, fmt, rule, name)
        ctx.zero_saturated = zero_saturated
        if zero_saturated:
            ctx.save_for_backward(saturated(x, fmt, rule))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = grads
        if ctx.zero_saturated:
            grad = grad.masked_fill(ctx.saved_tensors[0], 0)
        return grad, None, None, None, None
