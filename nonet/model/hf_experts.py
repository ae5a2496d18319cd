"""Routed experts between disk and model: one tensor for each expert there, one stack for all of them here.

Owns: MXFP4 codes in and out. Packed weights are read as the numbers their codes stand for, and written as the codes the
config's rule gives the master weights, which is what quantisation-aware training has seen all along. An expert whose
numbers are still those it was read with is written with the scales it was read with, so that reading and writing a
directory moves no bit, whoever chose its scales.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nonet.model.hf_files import checked
from nonet.model.hf_names import PACKED, SCALE, Place
from nonet.model.model import Model
from nonet.quant import MX, QuantConfig, decode, encode, pack

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what codes 0 to 7 are worth; bit 3 is the sign
_READ_WITH = "scales_read_with"  # attribute of a stacked parameter: uint8 [E, rows, columns / 32]


class Stacks:
    """Fills a model's stacks expert by expert, in `dtype`. A packed pair may come in either order and apart."""

    def __init__(self, model: Model, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.halves: dict[str, Tensor] = {}

    def put(self, name: str, place: Place, tensor: Tensor, where: Path | str) -> None:
        """One tensor of an expert; where: for refusals."""
        if not name.endswith((PACKED, SCALE)):
            self._stack(place).detach()[place.expert] = tensor
            return
        stem = name.removesuffix(PACKED).removesuffix(SCALE)
        other = self.halves.pop(stem, None)
        if other is None:
            self.halves[stem] = tensor
            return
        packed, scales = (tensor, other) if name.endswith(PACKED) else (other, tensor)
        weight = decode(pack.unpack(packed, scales, f"{stem}.weight"), self.dtype)
        stack = self._stack(place)
        stack.detach()[place.expert] = checked(weight, f"{stem}.weight", where)
        if not hasattr(stack, _READ_WITH):
            setattr(stack, _READ_WITH, torch.empty(len(stack), *scales.shape, dtype=torch.uint8))
        getattr(stack, _READ_WITH)[place.expert] = scales

    def _stack(self, place: Place) -> nn.Parameter:
        module, _, leaf = place.parameter.rpartition(".")
        owner = self.model.get_submodule(module)
        parameter: nn.Parameter = getattr(owner, leaf)
        if parameter.is_meta:
            parameter = nn.Parameter(torch.empty(parameter.shape, dtype=self.dtype, device="cpu"))
            setattr(owner, leaf, parameter)
        return parameter


def packed_expert(stack: nn.Parameter, expert: int, quant: QuantConfig) -> MX:
    """The codes and scales that stand for one expert of a stack."""
    weight = stack.detach()[expert].cpu()
    if weight.dtype == torch.float16:  # the formats take bfloat16 and wider
        weight = weight.float()
    read_with: Tensor | None = getattr(stack, _READ_WITH, None)
    kept = None if read_with is None else _under(weight, read_with[expert])
    return kept or encode(weight, "mxfp4", quant.rule)


def _under(weight: Tensor, scales: Tensor) -> MX | None:
    """The codes of `weight` under scales that are given; None if they cannot say it exactly."""
    ones = torch.full(weight.shape, _GRID.index(1.0), dtype=torch.uint8)
    scaled = weight.double() / decode(MX(ones, scales, "mxfp4"), torch.float64)
    grid = scaled.new_tensor(_GRID)
    codes = torch.searchsorted(grid, scaled.abs()).clamp_(max=len(_GRID) - 1)
    if not torch.equal(grid[codes], scaled.abs()):
        return None
    return MX(codes.to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3), scales, "mxfp4")
