"""MaxVio of a skewed router after five steps of balancing: the quantile rule, DeepSeek's sign rule, none.

MaxVio is the load of the busiest expert over the mean load, minus one. A step is one batch of 256 tokens per expert's
mean load (the sampling noise of that many tokens alone is about 0.15 to 0.2); it is routed under the bias that earlier
steps left behind, and its own observations move the bias for the next. Scores are sigmoid(normal + favour) with a fixed
favour per expert, so steep that without balancing the busiest expert is asked for by most tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nonet.ops.balance import QuantileHistogram, sign_bias
from nonet.progress import progress

SHAPES = ((64, 4), (256, 8), (896, 16))  # (experts, chosen per token); the last is K3's
TOKENS_PER_EXPERT, STEPS, SEEDS, SKEW, TARGET = 256, 5, (0, 1, 2), 1.0, 0.3

Rule = Callable[[QuantileHistogram, Tensor, Tensor], Tensor]  # (what was observed, loads, bias) -> bias
RULES: dict[str, Rule] = {
    "quantile": lambda seen, load_E, bias_E: seen.bias(),
    "sign_1e-3": lambda seen, load_E, bias_E: sign_bias(bias_E, load_E, 1e-3),
    "sign_1e-2": lambda seen, load_E, bias_E: sign_bias(bias_E, load_E, 1e-2),
    "none": lambda seen, load_E, bias_E: bias_E,
}


def measure() -> dict[str, Any]:
    """`maxvio_step5` by shape under the quantile rule, median over seeds; then the other rules, and every step."""
    curves: dict[str, dict[str, list[float]]] = {name: {} for name in RULES}
    with progress("bench balance: shapes and rules", len(SHAPES) * len(RULES)) as bar:
        for i, (experts, k) in enumerate(SHAPES):
            for j, (name, rule) in enumerate(RULES.items()):
                runs = [curve(rule, experts, k, seed) for seed in SEEDS]
                curves[name][f"E{experts} k{k}"] = [median(step) for step in zip(*runs, strict=True)]
                bar(i * len(RULES) + j + 1, name)
    last = {name: {shape: c[-1] for shape, c in by_shape.items()} for name, by_shape in curves.items()}
    out: dict[str, Any] = {"maxvio_step5": last["quantile"], "target": TARGET}
    out |= {f"maxvio_step5_{name}": figures for name, figures in last.items() if name != "quantile"}
    return out | {"maxvio_by_step": curves, "tokens_per_expert": TOKENS_PER_EXPERT, "skew": SKEW}


def curve(rule: Rule, experts: int, k: int, seed: int) -> list[float]:
    """MaxVio of the first batch and of the one after each of STEPS updates."""
    generator = torch.Generator().manual_seed(seed)
    favour_E = torch.randn(experts, generator=generator) * SKEW
    bias_E, out = torch.zeros(experts), []
    for _ in range(STEPS + 1):
        noise_NE = torch.randn(TOKENS_PER_EXPERT * experts // k, experts, generator=generator)
        scores_NE = torch.sigmoid(noise_NE + favour_E)
        best = (scores_NE + bias_E).topk(k + 1, -1)
        load_E = best.indices[:, :k].flatten().bincount(minlength=experts).double()
        out.append(float(load_E.max() / load_E.mean() - 1))
        seen = QuantileHistogram(bias_E, k)
        seen.add(scores_NE, best.values[:, k])
        bias_E = rule(seen, load_E, bias_E)
    return out
