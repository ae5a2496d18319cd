"""What a model remembers of its sequences: pools of memory, and rows of sequences into them.

A `Memory` holds one pool for every layer. Attention keeps one entry per position, PAGE positions a page; KDA keeps one
matrix per sequence, in a slot:

    gqa   k, v      [P, G, 16, K]    keys and values of each key head
    mla   latent    [P, 16, R]       compressed keys and values
    kda   matrix    [N, H, K, V]     the delta-rule state;   tail [N, kernel-1, 3*H*K]  the convolutions' last inputs

What somebody else keeps of the same positions (a draft) lies behind the last layer, by page: it grows, is shared and is
copied with the model's own.

A page is the same number in every layer, and so is a slot. A `SequenceState` of B sequences is addresses only: which
pages, in order, which slot, how many positions. Forward passes update it in place. What lies behind `lengths_B` is
garbage that masks never let through; a slot that starts a sequence must be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.model.config import ModelConfig

PAGE = 16  # positions; also the block the prefix cache hashes and the chunk KDA computes in
_BY_SLOT = ("matrix", "tail")  # everything else is by page


class Memory:
    """Pools of `pages` pages and `slots` slots; who uses which is the owner's business."""

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attached: Mapping[str, tuple[int, ...]] | None = None,
    ):
        """attached: name -> shape after [P, ...] of what is kept by page beside the model's own, in layers[-1]."""
        self.pages, self.slots = pages, slots
        self.layers: list[dict[str, Tensor]] = []
        shapes = [self._shapes(config, mixer) for mixer in config.layer_mixers]
        if attached:
            shapes.append([(name, (pages, *shape)) for name, shape in attached.items()])
        for pools in shapes:
            self.layers.append({name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in pools})

    def _shapes(self, c: ModelConfig, mixer: str) -> list[tuple[str, tuple[int, ...]]]:
        if mixer == "gqa":
            shape = (self.pages, c.gqa_kv_heads, PAGE, c.gqa_head_dim)
            return [("k", shape), ("v", shape)]
        if mixer == "mla":
            return [("latent", (self.pages, PAGE, c.kv_lora_rank + c.qk_rope_head_dim))]
        K = c.kda_head_dim
        tail = (self.slots, c.conv_kernel - 1, 3 * c.kda_width)
        return [("matrix", (self.slots, c.heads, K, K)), ("tail", tail)]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())

    def grow(self, pages: int, slots: int) -> None:
        """More room; pages and slots keep their numbers and what is in them, new ones are zero."""
        for layer in self.layers:
            for name, old in layer.items():
                count = slots if name in _BY_SLOT else pages
                if count > len(old):
                    layer[name] = old.new_zeros(count, *old.shape[1:])
                    layer[name][: len(old)] = old
        self.pages, self.slots = max(pages, self.pages), max(slots, self.slots)

    def copy_page(self, source: int, target: int) -> None:
        for layer in self.layers:
            for name in layer.keys() - _BY_SLOT:
                layer[name][target] = layer[name][source]

    def copy_slot(self, source: int, target: int, memory: Memory | None = None) -> None:
        """source: a slot of `memory`, which may keep another dtype; None: of this one."""
        for mine, theirs in zip(self.layers, (memory or self).layers, strict=False):  # one may have something attached
            for name in mine.keys() & _BY_SLOT:
                mine[name][target] = theirs[name][source]

    def clear_slot(self, slot: int) -> None:
        """As before the first position."""
        for layer in self.layers:
            for name in layer.keys() & _BY_SLOT:
                layer[name][slot] = 0


@dataclass
class SequenceState:
    """table_BP   pages of each row in order; unused entries name any page that exists
    slot_B     the KDA slot of each row
    lengths_B  how many positions each row has filled
    after_BT   the slot that gets a row's KDA state after each token of the next call, so that any of them can be gone
               back to; slot_B is then only read, unless named here. None: slot_B gets the last
    dense      the memory is exactly its rows, row n in slot n and the n-th run of pages: read without gathering
    """

    memory: Memory
    table_BP: Tensor
    slot_B: Tensor
    lengths_B: Tensor
    dense: bool = False
    after_BT: Tensor | None = None

    @staticmethod
    def new(
        config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> SequenceState:
        """An empty state for `batch` sequences in a memory of its own, `capacity` positions each (whole pages)."""
        pages = -(-capacity // PAGE)
        memory = Memory(config, batch * pages, batch, dtype, device)
        rows = torch.arange(batch, device=device)
        table_BP = torch.arange(batch * pages, device=device).view(batch, pages)
        return SequenceState(memory, table_BP, rows, torch.zeros_like(rows), dense=True)

    @property
    def batch(self) -> int:
        return len(self.lengths_B)

    @property
    def capacity(self) -> int:
        return self.table_BP.shape[1] * PAGE

    @property
    def layers(self) -> list[dict[str, Tensor]]:
        return self.memory.layers

    @property
    def bytes(self) -> int:
        """Of the whole memory it lies in."""
        return self.memory.bytes

    @property
    def slots(self) -> Tensor | slice:
        """What picks the rows' slots out of a pool: a slice, so a view, where they follow one another."""
        if not self.dense:
            return self.slot_B
        first = int(self.slot_B[0])
        return slice(first, first + self.batch)

    def places(self, positions_BT: Tensor, real_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """Page, and position in it, of positions in the flattened batch: of all, or of those at the indices real_N."""
        B, T = positions_BT.shape
        cells_N = torch.arange(B * T, device=positions_BT.device) if real_N is None else real_N
        at_N = positions_BT.flatten()[cells_N]
        return self.table_BP[cells_N // T, at_N // PAGE], at_N % PAGE

    def rows(self, start: int, stop: int) -> SequenceState:
        """Sequences start..stop-1, the same memory; advancing one advances the other."""
        parts = (t[start:stop] for t in (self.table_BP, self.slot_B, self.lengths_B))
        return SequenceState(self.memory, *parts, dense=self.dense)
