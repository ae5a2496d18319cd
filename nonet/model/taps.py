"""Hidden states out of the middle of a forward: what a draft reads of its target.

Tap k is the hidden state after k decoder layers, as the next reader finds it before its norm:

    k = 0        the embedding
    0 < k < L    what layer k reads: the residual stream, or the mixture of its attention-residual site
    k = L        what the final norm reads, which is what `Model.forward` returns

The same index as vLLM's aux layer ids, and as transformers' hidden_states[k] for k < L (its [L] is after the norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nonet.types import UserError


class Taps:
    """Given to `Model.forward`, keeps the hidden states at `layers`, detached.

    >>> taps = Taps((2, 15, 27))                                # doctest: +SKIP
    >>> model(tokens_BT, taps=taps); taps.features_BTF.shape    # doctest: +SKIP
    [B, T, 3 * D]
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._taken: dict[int, Tensor] = {}

    def take(self, layer: int, hidden_BTD: Tensor) -> None:
        self._taken[layer] = hidden_BTD.detach()

    @property
    def features_BTF(self) -> Tensor:
        """The last forward's, side by side in the order of `layers`: F = taps * D."""
        return torch.cat([self._taken[k] for k in self.layers], -1)


def checked_taps(layers: Sequence[int], depth: int) -> tuple[int, ...]:
    """Ascending, distinct taps of a model of `depth` layers; raises UserError."""
    if not layers:
        raise UserError("taps: none given; name at least one, such as the depth of the target")
    if any(a >= b for a, b in pairwise(layers)):
        raise UserError(f"taps = {list(layers)}: must ascend, each one once; a tap read twice adds nothing")
    if layers[0] < 0 or layers[-1] > depth:
        raise UserError(f"taps = {list(layers)}: the target has layers 0 to {depth - 1}, so taps go from 0 to {depth}")
    return tuple(layers)
