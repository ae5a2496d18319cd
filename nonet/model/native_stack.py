"""Blocks under one head, carried through by C: scratch, and how threads share the work.

Results do not depend on any of that, to the last bit (native/decode.c).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from nonet.model.native_layers import LayerAddresses, ModelAddresses, Rows
from nonet.model.state import SequenceState

MOST, ALONE = 64, 16  # as in decode_model.h
LINE = 16  # floats
_A, _I = ctypes.c_void_p, ctypes.c_int64
# Of one core, for choosing how threads share a step: bytes and operations a second, seconds a meeting of threads.
_STREAM, _ARITHMETIC, _MEET, _MEETS = 12e9, 70e9, 0.7e-6, 9
# Other work on the same cores makes a meeting last about a turn of the scheduler. A step that lost more by that than
# meeting gains is followed by a while in which nobody waits.
_TURN, _CROWDED = 3e-3, 0.05


class Stack:
    """`describe` it before the first `carry`, and whenever addresses have changed."""

    def __init__(self, library: ctypes.CDLL, elements: int, bits: float, context_bytes: int):
        """elements: weights that a token meets, of so many bits; context_bytes: what it reads of each earlier one."""
        self._step, self._floats = library.decode_step, library.decode_scratch
        self._floats.argtypes, self._floats.restype = (_A, _A, *(_I,) * 4), _I
        self._step.argtypes, self._step.restype = (*(_A,) * 6, *(_I,) * 3), _I
        self.together: bool | None = None  # whether all threads carry the same rows; None: whichever is faster
        self._elements, self._reading, self._context_bytes = elements, elements * bits / 8 / _STREAM, context_bytes
        self._scratch = torch.empty(0)
        self._pools: list[int] = []
        self._crowded_until = 0.0  # when threads try again to meet

    def describe(self, model: ModelAddresses, layers: Sequence[LayerAddresses]) -> None:
        self._model, self._layers, self._pools = model, (LayerAddresses * len(layers))(*layers), []

    def carry(
        self,
        x_ND: Tensor,
        state: SequenceState,
        pools: Sequence[dict[str, Tensor]],
        rotation: tuple[Tensor, Tensor] | None,
        after_BT: Tensor | None = None,
        taps: Sequence[int] = (),
        beside_ND: Tensor | None = None,
        ordered: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [N, W], and features [N, taps, D] where there are taps, of N = B * T rows: T tokens of each sequence
        of a state, which is advanced by them.

        x_ND: what the first layer reads, overwritten. pools: of each layer; further ones are left alone. rotation: cos
        and signed sin of every row. after_BT: the KDA slot that holds the state after each token (None: the sequence's
        own, overwritten); it may be the slot before it. taps: after how many layers features are taken.
        beside_ND: the other half of a draft's pairs. ordered: tokens of one sequence are given as sequences of their
        own, so that no thread may go ahead with later ones.
        """
        (rows, width), threads, layers = x_ND.shape, torch.get_num_threads(), self._layers
        tokens = rows // state.batch
        longest = int(state.lengths_B.max()) + tokens
        if longest > state.capacity:
            raise ValueError(f"state has room for {state.capacity} positions, this call needs {longest}")
        self._remember(pools)
        logits_NW = x_ND.new_empty(rows, self._model.W)
        features_NKD = x_ND.new_empty(rows, len(taps), width) if taps else None
        table, slots = state.table_BP.contiguous(), state.slot_B.contiguous()
        after = slots if tokens == 1 else slots.repeat_interleave(tokens)
        if after_BT is not None:
            after = after_BT.contiguous()
        turned = () if rotation is None else (rotation[0].contiguous(), rotation[1].contiguous())
        addresses = (state.lengths_B.data_ptr(), table.data_ptr(), slots.data_ptr(), after.data_ptr())
        where = Rows(state.batch, tokens, table.shape[1], len(taps), *addresses, *(t.data_ptr() for t in turned))
        if beside_ND is not None:
            where.beside = beside_ND.data_ptr()
        if features_NKD is not None:
            asked = (_I * len(taps))(*taps)
            where.tap, where.features = ctypes.addressof(asked), features_NKD.data_ptr()
        gain = self._gain(state.batch, tokens, longest, threads)
        crowded = time.perf_counter() < self._crowded_until
        together = gain > 0 and not crowded if self.together is None else self.together
        if ordered and not together:
            threads = 1
        scratch = self._room(rows, longest, threads, together)
        tensors = (x_ND.data_ptr(), ctypes.addressof(where), logits_NW.data_ptr(), scratch)
        stalls = self._step(ctypes.byref(self._model), layers, *tensors, longest, threads, together)
        if stalls * _TURN > max(gain, 0.0):
            self._crowded_until = time.perf_counter() + _CROWDED
        state.lengths_B += tokens
        return logits_NW, features_NKD

    def _remember(self, pools: Sequence[dict[str, Tensor]]) -> None:
        """Enter where the state's memory lies."""
        here = [t.data_ptr() for memory in pools for t in memory.values()]
        if here == self._pools:
            return
        self._pools = here
        for layer, memory in zip(self._layers, pools, strict=False):
            first, *_, last = memory.values() if len(memory) > 1 else (*memory.values(),) * 2
            layer.pool, layer.pool2 = first.data_ptr(), last.data_ptr()

    def _room(self, *size: int) -> int:
        """Address of scratch that lasts from call to call, on a line of the cache."""
        floats = self._floats(ctypes.byref(self._model), self._layers, *size)
        if self._scratch.numel() < floats + LINE:
            self._scratch = torch.empty(floats + LINE)
        return -(-self._scratch.data_ptr() // 64) * 64

    def _gain(self, sequences: int, tokens: int, context: int, threads: int) -> float:
        """Seconds saved, or lost, if all threads carry the same rows: that reads weights once for MOST rows and leaves
        no core idle, but costs meetings. Apart, each thread carries whole sequences, up to ALONE rows at a time, and
        reads all weights for them.
        """
        rows, block = sequences * tokens, min(sequences, max(1, ALONE // tokens)) * tokens
        row = 2 * self._elements / _ARITHMETIC + context * self._context_bytes / _STREAM
        meetings = _MEET * _MEETS * len(self._layers) if threads > 1 else 0.0
        apart = -(-rows // (block * threads)) * (-(-block // ALONE) * self._reading + block * row)
        return apart - -(-rows // MOST) * (self._reading / threads + meetings) - rows * row / threads
