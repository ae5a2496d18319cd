"""SequenceState: what a model remembers of B sequences after n tokens each, under one policy version.

Three kinds of layer memory, all with the sequence first so that rows can be selected, copied and packed:

    gqa   k, v        [B, H, L, K]    one slot per cached position
    mla   latent      [B, L, R]       compressed keys and values, one slot per cached position
    kda   matrix      [B, H, K, V]    the delta-rule state;   tail [B, kernel-1, 3*H*K]  the convolutions' last inputs

`lengths_B` says how many positions of each row are filled; slots beyond it hold garbage that masks never let through.
Forward passes update a state in place. `rows` gives a view, `select` an independent copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.model.config import ModelConfig

# Memories with one slot per position, and the dimension that counts the slots.
PAGED = {"k": 2, "v": 2, "latent": 1}


@dataclass
class SequenceState:
    layers: list[dict[str, Tensor]]
    lengths_B: Tensor
    capacity: int

    @staticmethod
    def new(
        config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> SequenceState:
        """An empty state for `batch` sequences with room for `capacity` positions each."""

        def make(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        layers: list[dict[str, Tensor]] = []
        for mixer in config.layer_mixers:
            if mixer == "gqa":
                shape = (config.gqa_kv_heads, capacity, config.gqa_head_dim)
                layers.append({"k": make(*shape), "v": make(*shape)})
            elif mixer == "mla":
                layers.append({"latent": make(capacity, config.kv_lora_rank + config.qk_rope_head_dim)})
            else:
                K = config.kda_head_dim
                layers.append(
                    {"matrix": make(config.heads, K, K), "tail": make(config.conv_kernel - 1, 3 * config.kda_width)}
                )
        return SequenceState(layers, torch.zeros(batch, dtype=torch.long, device=device), capacity)

    @property
    def batch(self) -> int:
        return len(self.lengths_B)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())

    def rows(self, start: int, stop: int) -> SequenceState:
        """Sequences start..stop-1, sharing memory with this state."""
        return self._map(lambda _, t: t[start:stop], self.lengths_B[start:stop])

    def select(self, rows: Sequence[int]) -> SequenceState:
        """A copy of some rows, in the order given."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.lengths_B.device)
        return self._map(lambda _, t: t[index], self.lengths_B[index])

    def write(self, at: int, other: SequenceState) -> None:
        """Copy all rows of `other` over rows at, at+1, ...; `other` may have less room, never more filled than fits."""
        stop = at + other.batch
        self.lengths_B[at:stop] = other.lengths_B
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for name, source in theirs.items():
                if name in PAGED:
                    room = min(self.capacity, other.capacity)
                    mine[name][at:stop].narrow(PAGED[name], 0, room).copy_(source.narrow(PAGED[name], 0, room))
                else:
                    mine[name][at:stop] = source

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        self.lengths_B[target] = self.lengths_B[source]
        for layer in self.layers:
            for tensor in layer.values():
                tensor[target] = tensor[source]

    def resized(self, batch: int, capacity: int) -> SequenceState:
        """A copy with other limits; rows and positions beyond them are dropped, new ones are zero."""
        rows, room = min(batch, self.batch), min(capacity, self.capacity)

        def copy(name: str, t: Tensor) -> Tensor:
            shape = [batch, *t.shape[1:]]
            if name not in PAGED:
                out = t.new_zeros(shape)
                out[:rows] = t[:rows]
                return out
            slots = PAGED[name]
            shape[slots] = capacity
            out = t.new_zeros(shape)
            out[:rows].narrow(slots, 0, room).copy_(t[:rows].narrow(slots, 0, room))
            return out

        lengths = self.lengths_B.new_zeros(batch)
        lengths[:rows] = self.lengths_B[:rows]
        return SequenceState(self._map(copy, lengths).layers, lengths, capacity)

    def _map(self, fn: Callable[[str, Tensor], Tensor], lengths: Tensor) -> SequenceState:
        layers = [{name: fn(name, t) for name, t in layer.items()} for layer in self.layers]
        return SequenceState(layers, lengths, self.capacity)
