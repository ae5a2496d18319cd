"""Per-token policy objectives. The learner hands over log-probs and gets a summed loss back; it is blind to which.

K25 (Kimi K2.5, used by K3): maximise  sum_t M_t rho_t A_t - tau (log rho_t)^2,  rho = pi / mu with mu the policy that
sampled that very token, M_t = 1 where ratio_low <= rho <= ratio_high whatever the sign of A. The square is never
masked:
it pulls drifted tokens back.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class K25:
    ratio_low: float
    ratio_high: float
    tau: float

    def __call__(self, logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor) -> Tensor:
        """Loss summed over N trained tokens; the caller divides by its global count."""
        log_ratio_N = logp_N - behaviour_N
        ratio_N = log_ratio_N.exp()
        inside_N = (ratio_N >= self.ratio_low) & (ratio_N <= self.ratio_high)
        gain_N = (ratio_N * advantage_N).masked_fill(~inside_N, 0.0)
        return -(gain_N - self.tau * log_ratio_N.square()).sum()
