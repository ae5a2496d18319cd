"""How a model starts: every parameter from one seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nonet.model.model import Model


def initialise(model: Model, seed: int) -> Model:
    """Fill all parameters in place from a seed.

    | parameter                              | value                                                     |
    |----------------------------------------|-----------------------------------------------------------|
    | matrices, embeddings, experts, router  | normal(0, init_std)                                       |
    | o_proj, down_proj, experts.w2          | normal(0, init_std / sqrt(2 * layers))                    |
    | norms; biases                          | 1; 0                                                      |
    | attention-residual queries             | 0: every site starts as a plain mean                      |
    | router's selection bias                | 0                                                         |
    | convolutions                           | uniform(+-1/sqrt(kernel))                                 |
    | KDA dt_bias                            | softplus^-1(log-uniform 1e-3..1e-1), as in Mamba-2        |
    | KDA A_log                              | 0 (bounded decay); log uniform(1, 16) (softplus decay)    |
    | MTP eh_proj                            | [0 I] + normal(0, init_std): starts on the hidden state   |
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    std, depth = config.init_std, (2 * config.layers) ** -0.5
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("dt_bias"):
                init_dt_bias_(p, generator)
            elif name.endswith("A_log") and config.decay == "softplus":
                p.uniform_(1, 16, generator=generator).log_()
            elif "conv1d" in name:
                p.uniform_(-(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5, generator=generator)
            elif p.ndim == 1 or "_res.proj" in name:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                scaled = name.endswith(("o_proj.weight", "down_proj.weight", "experts.w2"))
                p.normal_(0, std * (depth if scaled else 1), generator=generator)
        if model.mtp is not None:
            model.mtp.eh_proj.weight[:, config.d_model :] += torch.eye(config.d_model)
    return model


def init_dt_bias_(dt_bias: Tensor, generator: torch.Generator | None) -> None:
    """softplus^-1 of log-uniform [1e-3, 1e-1] (Mamba-2): at the start most channels forget slowly."""
    u = torch.rand(dt_bias.shape, generator=generator)
    dt = torch.exp(u * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
