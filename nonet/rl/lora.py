"""Train low-rank factors instead of weights: every target W becomes W0 + (alpha / rank) B A, W0 standing still.

The model itself always holds the merged weights, so sampler, learner, quantiser and native kernels see an ordinary
model. With G = dL / dW of one backward pass, the factors' gradients are s B^T G and s G A^T: exactly those that a
forward through the factors would give. Saved is what an optimiser keeps (its state is the factors' alone) and what a
checkpoint of an expert weighs (a PEFT directory, model/peft.py); G itself is made and dropped in every update.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from nonet.config import Config
from nonet.model import Model, peft
from nonet.ops.rng import stream_key, uniforms
from nonet.types import UserError

A, B = ".lora_A.weight", ".lora_B.weight"


class LoraConfig(Config):
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)  # the product is scaled by alpha / rank
    # linear layers with these names are adapted; everything else stands still
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    start: str = ""  # a PEFT directory of the same rank, alpha and targets to continue from; empty: B = 0


class Lora:
    """The factors of a model's targets. Parameters that are no target stop asking for gradients."""

    def __init__(self, model: Model, config: LoraConfig):
        self.model, self.config, self.scale = model, config, config.alpha / config.rank
        self._layers = targets(model, config.targets)
        self._base = {name: layer.weight.detach().clone() for name, layer in self._layers.items()}
        adapted = {id(layer.weight) for layer in self._layers.values()}
        for p in model.parameters():
            p.requires_grad_(id(p) in adapted)
        self.factors: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            self.factors[name + A] = nn.Parameter(start(name, config.rank, layer.weight))
            self.factors[name + B] = nn.Parameter(layer.weight.new_zeros(len(layer.weight), config.rank))
        if config.start:
            self.load_state_dict(_read(model, config))

    @torch.no_grad()
    def gather(self) -> None:
        """Turn the weights' gradients into the factors', and drop them."""
        for name, layer in self._layers.items():
            gradient, a, b = layer.weight.grad, self.factors[name + A], self.factors[name + B]
            if gradient is not None:
                a.grad, b.grad = self.scale * (b.mT @ gradient), self.scale * (gradient @ a.mT)
            layer.weight.grad = None

    @torch.no_grad()
    def merge(self) -> None:
        """Write the weights that the factors stand for into the model."""
        for name, layer in self._layers.items():
            product = self.factors[name + B] @ self.factors[name + A]
            layer.weight.copy_(self._base[name].add(product, alpha=self.scale))

    def save(self, directory: Path, base: Path | str) -> None:
        """As PEFT does; base: the model directory that training began with."""
        peft.save(self.model.config, self.state_dict(), self.config.rank, self.config.alpha, base, directory)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.factors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.factors.keys():
            raise ValueError(f"the factors are of other layers: {sorted(state.keys() ^ self.factors.keys())[:2]}")
        for name, p in self.factors.items():
            p.copy_(state[name])
        self.merge()


def targets(model: Model, names: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Linear layers by full name; of the MTP layer none, which RL carries along unchanged."""
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.startswith("mtp.")}
    for name in names:
        if not any(n.rsplit(".", 1)[-1] == name for n in linear):
            known = ", ".join(sorted({n.rsplit(".", 1)[-1] for n in linear}))
            raise UserError(f"rl.lora.targets: {name!r}: the model has no such linear layer; it has {known}")
    if "lm_head" in names and model.config.tie_embeddings:
        raise UserError("rl.lora.targets: 'lm_head': it is the embedding table too (tied); leave it out")
    return {n: m for n, m in linear.items() if n.rsplit(".", 1)[-1] in names}


def start(name: str, rank: int, weight: Tensor) -> Tensor:
    """A of [rank, in], uniform within 1 / sqrt(in) as PEFT's, a pure function of the layer's name and shape."""
    columns = weight.shape[1]
    key = np.tile(np.array(stream_key(0, f"lora/{name}")), (rank * columns, 1))
    drawn = torch.from_numpy(uniforms(key, np.arange(rank * columns)).reshape(rank, columns))
    return ((2 * drawn - 1) / columns**0.5).to(weight)


def _read(model: Model, config: LoraConfig) -> dict[str, Tensor]:
    found, rank, alpha = peft.factors(config.start, model.config)
    if (rank, alpha) != (config.rank, config.alpha):
        raise UserError(
            f"rl.lora.rank, rl.lora.alpha = {config.rank}, {config.alpha:g}: the adapter in {config.start} has "
            f"{rank}, {alpha:g}; set these"
        )
    wanted = {name + end for name in targets(model, config.targets) for end in (A, B)}
    if found.keys() != wanted:
        odd = sorted(found.keys() ^ wanted)[0]
        raise UserError(f"rl.lora.targets: the adapter in {config.start} has other layers ({odd}); name the same")
    return found
