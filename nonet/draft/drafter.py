"""A draft behind the engine's Drafter protocol, in torch: true pairs into pages, then a chain of its own states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.draft.cache import enter, features_before, keep_features, pools
from nonet.draft.model import Draft
from nonet.engine.drafter import Choice, Pairs, Proposal
from nonet.model.state import Memory, SequenceState


class TorchDrafter:
    """steps: most tokens proposed. sampled: draw from q where a row samples, so that the engine accepts min(1, p / q);
    False proposes the argmax, which it accepts with the target's own probability.
    """

    def __init__(self, draft: Draft, steps: int, sampled: bool = True):
        self.draft, self.steps, self.sampled = draft.eval(), steps, sampled
        self.taps = draft.config.taps
        self.pools: Mapping[str, tuple[int, ...]] = pools(draft.config)
        self.refresh()

    def refresh(self) -> None:
        self._head_WD = self.draft.head().detach()

    @torch.no_grad()
    def observe(self, features_NF: Tensor, pages_N: Tensor, offsets_N: Tensor, memory: Memory) -> None:
        keep_features(self.draft, features_NF, pages_N, offsets_N, memory)

    @torch.no_grad()
    def enter(self, pairs: Pairs) -> None:
        self._entered(pairs)

    @torch.no_grad()
    def propose(self, pairs: Pairs, most: int, choice: Choice) -> Proposal:
        steps = min(most, self.steps)
        drawn = self.sampled and bool((choice.rows.temperature > 0).any())
        state, tokens, q = replace(pairs.state, lengths_B=pairs.state.lengths_B + pairs.counts_B), [], []
        logits_BW, out_BD = self._first(pairs)
        for k in range(steps):
            index_B, q_BW = choice.pick(logits_BW, k) if drawn else (logits_BW.argmax(-1), None)
            tokens.append(index_B if self.draft.d2t_W is None else self.draft.d2t_W[index_B])
            q.append(q_BW)
            if k < steps - 1:
                logits_BW, out_BD = self._next(tokens[-1], self.draft.recycled(out_BD), state)
        counts_B = torch.full_like(pairs.counts_B, steps)
        return Proposal(torch.stack(tokens, 1), counts_B, torch.stack(q, 1) if drawn else None, self.draft.d2t_W)

    def _first(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Enter the pairs; logits_BW and out_BD of each row's last."""
        out_BD = self._entered(pairs)
        return self._logits(out_BD), out_BD

    def _next(self, tokens_B: Tensor, recycled_BD: Tensor, state: SequenceState) -> tuple[Tensor, Tensor]:
        """Enter a recycled pair a row at lengths_B, which moves behind it; logits_BW and out_BD."""
        out_BD = enter(self.draft, tokens_B.unsqueeze(1), recycled_BD.unsqueeze(1), state, None)[:, 0]
        return self._logits(out_BD), out_BD

    def _logits(self, out_BD: Tensor) -> Tensor:
        return F.linear(self.draft.final_norm(out_BD), self._head_WD)

    def _entered(self, pairs: Pairs) -> Tensor:
        """Enter the pairs; out_BD of each row's last. The rows' own lengths stand still."""
        state = replace(pairs.state, lengths_B=pairs.state.lengths_B.clone())
        fused_BTD = features_before(state, pairs.tokens_BT.shape[1])
        out_BTD = enter(self.draft, pairs.tokens_BT, fused_BTD, state, pairs.counts_B)
        return out_BTD[torch.arange(len(out_BTD)), pairs.counts_B - 1]
