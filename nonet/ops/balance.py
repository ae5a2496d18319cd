"""Which selection bias spreads a batch evenly over experts: quantile balancing (Kimi K3 report, section 2.3.3, app. C
and D; k3 section 8.2), and the sign rule of DeepSeek-V3 as its control.

For token i let alpha_i be the (k+1)-th largest of s_i + b: what an expert must beat to be chosen. Expert j would be
chosen by token i under any bias above r_ij = alpha_i - s_ij, so the bias that gives it its share k/E of all tokens is
the k/E quantile of r_.j. All experts together, then centred: one exact coordinate step of the balanced-assignment dual.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 1000


def quantile_bias(scores_NE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The exact rule, by sorting: new bias_E. The slow twin of `QuantileHistogram`."""
    N, E = scores_NE.shape
    alpha_N = (scores_NE + bias_E).topk(top_k + 1, dim=-1).values[:, top_k]
    required_NE = (alpha_N.unsqueeze(1) - scores_NE).sort(dim=0).values
    bias = required_NE[min(N - 1, max(0, -(-N * top_k // E) - 1))]
    return bias - bias.mean()


def sign_bias(bias_E: Tensor, load_E: Tensor, step: float) -> Tensor:
    """b + step for experts below the mean load, b - step above it (DeepSeek-V3's auxiliary-loss-free rule)."""
    return bias_E + step * torch.sign(load_E.double().mean() - load_E).to(bias_E)


class QuantileHistogram:
    """The same quantile from counts, so that micro-batches (and ranks) add up: one pass, one bin width of error.

    Bins cover [min b - 1, max b + 1], where every r_ij lies because scores lie in (0, 1).
    """

    def __init__(self, bias_E: Tensor, top_k: int, bins: int = BINS):
        self.start_E, self.top_k, self.bins = bias_E, top_k, bins
        self.low = float(bias_E.min()) - 1
        self.width = (float(bias_E.max()) + 1 - self.low) / bins
        self.counts_EN = torch.zeros(len(bias_E), bins, dtype=torch.long, device=bias_E.device)
        self.load_E = torch.zeros(len(bias_E), dtype=torch.long, device=bias_E.device)
        self.tokens = 0

    def add(self, scores_NE: Tensor, alpha_N: Tensor) -> None:
        """scores_NE: raw scores of real tokens; alpha_N: their (k+1)-th largest biased score."""
        N, E = scores_NE.shape
        required_NE = alpha_N.unsqueeze(1) - scores_NE
        bin_NE = ((required_NE - self.low) / self.width).long().clamp_(0, self.bins - 1)
        flat = bin_NE + torch.arange(E, device=bin_NE.device) * self.bins
        self.counts_EN += torch.bincount(flat.flatten(), minlength=E * self.bins).view(E, self.bins)
        self.load_E += (required_NE < self.start_E).sum(0)
        self.tokens += N

    def bias(self) -> Tensor:
        """Interpolated inside the first bin whose cumulative count reaches the target; centred."""
        target = self.tokens * self.top_k / len(self.counts_EN)
        total_EN = self.counts_EN.cumsum(1)
        bin_E = (total_EN >= max(1, -(-self.tokens * self.top_k // len(self.counts_EN)))).long().argmax(1)
        here_E = self.counts_EN.gather(1, bin_E.unsqueeze(1)).squeeze(1)
        before_E = total_EN.gather(1, bin_E.unsqueeze(1)).squeeze(1) - here_E
        inside_E = ((target - before_E).double() / here_E.clamp(min=1)).clamp(0, 1)
        bias = self.low + (bin_E + inside_E) * self.width
        return (bias - bias.mean()).to(self.start_E)

    def max_violation(self) -> Tensor:
        """MaxVio: load of the busiest expert over the mean load, minus one."""
        load = self.load_E.double()
        return load.max() / load.mean() - 1
