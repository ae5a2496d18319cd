"""The model's part of a step: tokens in, logits out. Batched through torch, a few tokens a row through C, or every
token alone: the slow twin, whose results depend to the last bit on nothing but weights and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nonet.model import Model, SequenceState
from nonet.model.native_decode import NativeDecoder
from nonet.model.taps import Taps


class Forward:
    """taps: which hidden states come with the logits of `prompt` and `extend`; none: None comes instead."""

    def __init__(self, model: Model, native: NativeDecoder | None, deterministic: bool, taps: Sequence[int] = ()):
        self.model, self.native, self.deterministic, self.taps = model, native, deterministic, tuple(taps)

    def prompt(self, tokens_BT: Tensor, state: SequenceState, counts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits [B, W] after the last of each row's counts[b] tokens, and the features of all [B, T, F]."""
        if self.deterministic:
            return self._prompt_alone(tokens_BT, state, counts)
        last_B = torch.tensor(counts, device=tokens_BT.device) - 1
        ragged = min(counts) < tokens_BT.shape[1]
        taps = self._taps()
        hidden_BTD = self.model(tokens_BT, state, last_B + 1 if ragged else None, taps=taps)
        rows_B = torch.arange(len(last_B), device=tokens_BT.device)
        return self.model.logits(hidden_BTD[rows_B, last_B]), taps and taps.features_BTF

    def decode(self, tokens_B1: Tensor, state: SequenceState) -> Tensor:
        """Logits [B, W] after one token a row."""
        if self.deterministic:
            return self._prompt_alone(tokens_B1, state, [1] * len(tokens_B1))[0]
        if self.native is not None:
            return self.native.step(tokens_B1, state)
        return self.model.logits(self.model(tokens_B1, state)[:, -1])

    def extend(self, tokens_BT: Tensor, state: SequenceState, after_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, W] after each of a few tokens, and their features [B, T, F]. after_BT: the slot that gets the
        KDA state after each; None: there is none.
        """
        if self.deterministic:
            return self._extend_alone(tokens_BT, state, after_BT)
        taps = self._taps()
        if self.native is not None:
            return self.native.extend(tokens_BT, state, after_BT, taps), taps and taps.features_BTF
        state.after_BT = after_BT
        return self.model.logits(self.model(tokens_BT, state, taps=taps)), taps and taps.features_BTF

    def _taps(self) -> Taps | None:
        return Taps(self.taps) if self.taps else None

    # ------------------------------------------------------------------ alone

    def _prompt_alone(
        self, tokens_BT: Tensor, state: SequenceState, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        logits, features = [], []
        for b, n in enumerate(counts):
            row = state.rows(b, b + 1)
            fed = [self._feed(tokens_BT[b : b + 1, t : t + 1], row) for t in range(n)]
            logits.append(self.model.logits(fed[-1][0][:, -1]))
            features.append([seen_11F[0, 0] for _, seen_11F in fed if seen_11F is not None])
        together = pad_sequence([torch.stack(f) for f in features], batch_first=True) if self.taps else None
        return torch.cat(logits), together

    def _extend_alone(
        self, tokens_BT: Tensor, state: SequenceState, after_BT: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        B, T = tokens_BT.shape
        logits, features = [], []
        for b in range(B):
            row = state.rows(b, b + 1)
            for t in range(T):
                if after_BT is not None:
                    row.after_BT = after_BT[b : b + 1, t : t + 1]
                hidden_11D, seen_11F = self._feed(tokens_BT[b : b + 1, t : t + 1], row)
                logits.append(self.model.logits(hidden_11D[:, -1]))
                if seen_11F is not None:
                    features.append(seen_11F)
                if row.after_BT is not None:
                    row.slot_B = row.after_BT[:, 0]
        together = torch.cat(features).view(B, T, -1) if self.taps else None
        return torch.cat(logits).view(B, T, -1), together

    def _feed(self, token_11: Tensor, row: SequenceState) -> tuple[Tensor, Tensor | None]:
        taps = self._taps()
        return self.model(token_11, row, taps=taps), taps and taps.features_BTF
