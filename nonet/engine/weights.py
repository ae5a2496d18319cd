"""New weights into a model that is in use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nonet.model import Model
from nonet.types import UserError


@torch.no_grad()
def copy_weights(model: Model, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` over the model's own, in place, casting to its dtype. UserError naming the first name that is
    missing, unknown or of another shape; then nothing has been copied.
    """
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            raise UserError(f"weights: {name} is missing; give all {len(own)} of the model's tensors")
        if name not in own:
            raise UserError(f"weights: {name} is not a tensor of this model; drop it or load the right checkpoint")
        if own[name].shape != weights[name].shape:
            raise UserError(
                f"weights: {name} is {list(weights[name].shape)}; the model's is {list(own[name].shape)}: "
                "another model's checkpoint?"
            )
    for name, tensor in own.items():
        tensor.copy_(weights[name])
