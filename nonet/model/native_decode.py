"""A model's decoding in C: same arguments and results as its torch twin, `Model.logits(model(tokens, state))`.

The C side (native/decode.c) multiplies with copies of all big matrices, in float32 or fewer bits (native_weights.py),
and reads norms, biases, convolutions and MLA's kv_b where torch keeps them. Copies are made anew, and addresses taken
again, at the first step after a change of a parameter (native_weights.Watch) and after `refresh`. Activations, caches,
routers and what is read in place stay float32. CPU only; `NativeDecoder.of` returns None for everything that C does not
know, and the caller stays with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nonet import native
from nonet.model.model import Model
from nonet.model.native_layers import at, copies_of, describe, describe_block, known
from nonet.model.native_stack import Stack
from nonet.model.native_weights import BITS, Watch, Weights
from nonet.model.native_weights import known as known_weights
from nonet.model.state import SequenceState
from nonet.model.taps import Taps


class NativeDecoder:
    """`step` feeds one token to every sequence of a state, `extend` a few."""

    @staticmethod
    def of(model: Model, weights: str = "float32") -> NativeDecoder | None:
        """weights: a format of native_weights.py. None where C does not know the model."""
        chosen = known_weights(weights)
        parameters = list(model.parameters())
        plain = all(w.dtype == torch.float32 and w.device.type == "cpu" and w.is_contiguous() for w in parameters)
        library = native.library() if plain and known(model.config) else None
        return None if library is None else NativeDecoder(model, library, chosen)

    def __init__(self, model: Model, library: ctypes.CDLL, weights: Weights = "float32"):
        self.model = model
        self.weights: Weights = weights
        self._watch = Watch(model.parameters())
        elements = sum(w.numel() for w in model.parameters()) - model.embed_tokens.weight.numel()
        elements += model.lm_head.weight.numel()
        self.stack = Stack(library, elements, BITS[weights], model.cost.bytes_per_token(4))

    def step(self, tokens_B1: Tensor, state: SequenceState) -> Tensor:
        """Logits [B, W] behind one token."""
        return self._carry(tokens_B1[:, 0], state.lengths_B[:, None], state)[0]

    def extend(
        self, tokens_BT: Tensor, state: SequenceState, after_BT: Tensor | None = None, taps: Taps | None = None
    ) -> Tensor:
        """Logits [B, T, W] behind each of T tokens, to the last bit those of T calls of `step`; weights are read once.

        after_BT: the KDA slot that gets the state after each token, so that any of them can be gone back to: a token
        reads the slot of the one before it, the first the sequence's own, which stays as it is unless named here. None:
        all run through the sequence's own slot. taps: filled as by `Model.forward`.
        """
        positions_BT = state.lengths_B[:, None] + torch.arange(tokens_BT.shape[1])
        layers = () if taps is None else taps.layers
        logits_NW, features_NKD = self._carry(tokens_BT.flatten(), positions_BT, state, after_BT, layers)
        if taps is not None and features_NKD is not None:
            for i, layer in enumerate(layers):
                taps.take(layer, features_NKD[:, i].unflatten(0, tokens_BT.shape))
        return logits_NW.unflatten(0, tokens_BT.shape)

    def _carry(
        self,
        tokens_N: Tensor,
        positions_BT: Tensor,
        state: SequenceState,
        after_BT: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        self._point()
        model = self.model
        x_ND = model.embed_tokens(tokens_N).contiguous()
        return self.stack.carry(x_ND, state, state.layers, model.rotation(positions_BT), after_BT, taps)

    def refresh(self) -> None:
        """The weights have changed, perhaps behind torch's back (through .data or numpy)."""
        self._watch.forget()

    def _point(self) -> None:
        """Describe the model to C, again if any weight has changed."""
        if not self._watch.changed():
            return
        self._copies = copies_of(self.model.config, self.weights)
        blocks = [describe_block(block, *self._copies) for block in self.model.layers]
        model, site = self.model, self.model.output_attn_res
        ends = {} if site is None else {"mix": at(site.proj), "mix_norm": at(site.norm)}
        weights = model.norm, model.lm_head.weight, *self._copies
        self.stack.describe(describe(model.config, len(blocks), *weights, **ends), blocks)
