"""A draft's chain in C: the torch drafter (drafter.py) with its layer and head carried by native/decode.c.

A draft's layer is a model of one layer that reads pairs: [norm(embedding); norm(state)], joined by a matrix to what an
MTP block starts from, or read as it is by EAGLE-3's attention. Position 0 has no entry and is skipped. Features are
fused, and prompts entered, by torch: that is many rows at once. Weights may be kept in fewer bits, as the target's are;
whatever is proposed, the target decides.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nonet import native
from nonet.draft.cache import features_before
from nonet.draft.drafter import TorchDrafter
from nonet.draft.model import Draft, PairLayer
from nonet.engine.drafter import Pairs
from nonet.model.native_layers import LayerAddresses, at, copies_of, describe, describe_block, describe_layer, known
from nonet.model.native_stack import Stack
from nonet.model.native_weights import BITS, Watch, Weights
from nonet.model.native_weights import known as known_weights
from nonet.model.state import SequenceState


def drafter_of(draft: Draft, steps: int, sampled: bool = True, weights: str = "float32") -> TorchDrafter:
    """The fastest there is for this draft on this machine."""
    return NativeDrafter.of(draft, steps, sampled, weights) or TorchDrafter(draft, steps, sampled)


class NativeDrafter(TorchDrafter):
    @staticmethod
    def of(draft: Draft, steps: int, sampled: bool = True, weights: str = "float32") -> NativeDrafter | None:
        """None for what C does not know: other devices and dtypes, rotated MLA. weights: as NativeDecoder.of."""
        chosen = known_weights(weights)
        tensors = [*draft.parameters(), draft.target.embed_tokens.weight, draft.target.lm_head.weight]
        plain = all(w.dtype == torch.float32 and w.device.type == "cpu" and w.is_contiguous() for w in tensors)
        library = native.library() if plain and known(draft.config.layer) else None
        return None if library is None else NativeDrafter(draft, steps, sampled, library, chosen)

    def __init__(self, draft: Draft, steps: int, sampled: bool, library: ctypes.CDLL, weights: Weights = "float32"):
        self.weights: Weights = weights
        c = draft.config.layer
        elements = sum(w.numel() for name, w in draft.named_parameters() if not name.startswith(("fc.", "lm_head.")))
        entry = 2 * c.gqa_kv_heads * c.gqa_head_dim if draft.config.form == "eagle3" else c.kv_lora_rank
        self.stack = Stack(library, elements + draft.config.words * c.d_model, BITS[weights], 4 * entry)
        self._watch = Watch([*draft.parameters(), draft.target.lm_head.weight])
        super().__init__(draft, steps, sampled)

    def refresh(self) -> None:
        super().refresh()
        self._watch.changed()  # nothing has, since what is copied now
        draft, c = self.draft, self.draft.config.layer
        self._copies = copies_of(c, self.weights)
        if draft.config.form == "mtp":
            mtp = draft.mtp
            ends = {"beside_norm": at(mtp.enorm), "stream_norm": at(mtp.hnorm)}
            ends |= {"join": self._copies[0].at(mtp.eh_proj.weight)}
            layer = describe_block(mtp.block, *self._copies)
        else:
            ends = {"beside_norm": at(draft.layer.input_layernorm), "stream_norm": at(draft.layer.hidden_norm)}
            layer = self._pair_layer(draft.layer)
        more = {"residual": 0, "skip": 1, "normed": draft.config.norm_before_residual, **ends}
        self.stack.describe(describe(c, 1, draft.final_norm, self._head_WD, *self._copies, **more), [layer])

    def _pair_layer(self, layer: PairLayer) -> LayerAddresses:
        return describe_layer(layer.self_attn, layer.mlp, *self._copies, ln2=at(layer.post_attention_layernorm))

    # ------------------------------------------------------------------- steps

    def _first(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Every real pair is a row of its own: none is computed in vain, nothing is written behind a row's last."""
        state, T = pairs.state, pairs.tokens_BT.shape[1]
        steps_T = torch.arange(T)
        real_N = (steps_T < pairs.counts_B[:, None]).flatten().nonzero()[:, 0]
        row_N = real_N // T
        at_N = (state.lengths_B[:, None] + steps_T).flatten()[real_N]
        rows = SequenceState(state.memory, state.table_BP[row_N], state.slot_B[row_N], at_N)
        fused_ND = features_before(state, T).flatten(0, 1)[real_N]
        logits_NW, out_ND = self._carry(pairs.tokens_BT.flatten()[real_N], fused_ND, rows)
        last_B = pairs.counts_B.cumsum(0) - 1
        return logits_NW[last_B], out_ND[last_B]

    def _next(self, tokens_B: Tensor, recycled_BD: Tensor, state: SequenceState) -> tuple[Tensor, Tensor]:
        return self._carry(tokens_B, recycled_BD, state)

    def _carry(self, tokens_N: Tensor, state_ND: Tensor, rows: SequenceState) -> tuple[Tensor, Tensor]:
        """Logits and outputs of pairs at rows.lengths_B, which moves behind them; state_ND is overwritten."""
        if self._watch.changed():
            self.refresh()
        draft, at_N = self.draft, rows.lengths_B - 1
        embed_ND = draft.embed(tokens_N)
        if draft.config.form == "mtp":  # the first row's embedding is left out (model.MTP)
            embed_ND = embed_ND * (at_N > 0).unsqueeze(-1)
        pools = [{name: pool for name, pool in rows.layers[-1].items() if name != "feature"}]
        logits_NW, out_NKD = self.stack.carry(
            *(state_ND, rows, pools, draft.rotation(at_N[:, None])), taps=(1,), beside_ND=embed_ND, ordered=True
        )
        assert out_NKD is not None
        return logits_NW, out_NKD[:, 0]
