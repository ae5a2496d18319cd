"""Policy objectives. The learner hands over log-probs and gets a summed loss back; it is blind to which.

Notation: mu the policy that sampled the token, pi_old the one that the iteration began with ("proximal"), pi the
current one; rho = pi / mu per token; A the token's advantage; sg stops the gradient. Every formula is to be maximised,
summed over trained tokens or over rows; the loss is its negative, and the learner owns the denominator.

Each objective is a table of the recipe ([rl.k25], [rl.ppo], ...), so its knobs are documented where its formula is;
`rl.objective` names the one that is used.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from nonet.config import Config

Need = Literal["proximal", "logits"]
Per = Literal["token", "sequence"]
Anchor = Literal["behaviour", "proximal"]


class Tokens(NamedTuple):
    """The N trained tokens of one micro-batch, row by row.

    logp_N log pi, with gradient; behaviour_N log mu, recorded at sampling; advantage_N; row_N which row a token is of,
    0..R-1. Where the objective needs them: proximal_N log pi_old, logits_NW at the sampling temperature, with gradient.
    teacher: what `Learner.teacher` made of the rows.
    """

    logp_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    row_N: Tensor
    proximal_N: Tensor | None = None
    logits_NW: Tensor | None = None
    teacher: Any = None

    def anchor(self, name: Anchor) -> Tensor:
        """log mu or log pi_old."""
        if name == "behaviour":
            return self.behaviour_N
        assert self.proximal_N is not None
        return self.proximal_N

    def row_mean(self, x_N: Tensor) -> Tensor:
        """mean_N: each token gets the mean over its row."""
        return self.row_sum(x_N) / self.row_sum(x_N.new_ones(x_N.shape))

    def row_sum(self, x_N: Tensor) -> Tensor:
        """sum_N: each token gets the sum over its row."""
        rows = int(self.row_N.max()) + 1 if len(self.row_N) else 0
        return x_N.new_zeros(rows).index_add(0, self.row_N, x_N)[self.row_N]


class Objective(Protocol):
    """needs: what Tokens must carry beside the first four. per: whether the learner divides the summed loss by its
    minibatch's trained tokens or by its rows.
    """

    @property
    def needs(self) -> frozenset[Need]: ...

    @property
    def per(self) -> Per: ...

    def __call__(self, tokens: Tokens) -> Tensor:
        """The loss, summed."""
        ...

    def clipped(self, tokens: Tokens) -> Tensor:
        """clipped_N: True where a window, clip or mask changed the token's part in the gradient."""
        ...


class Table(Config):
    """An objective as a table of the recipe."""

    @property
    def per(self) -> Per:
        return "token"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"proximal"} if getattr(self, "anchor", "") == "proximal" else ())


class K25(Table):
    """Kimi K2.5 Eq. 1, used by K3: M rho A - tau (log pi - log anchor)^2, M = 1 where low <= rho <= high, else 0.

    The window bounds the ratio (not its logarithm) whatever the sign of A. The square is never masked: it pulls drifted
    tokens back.
    """

    ratio_low: float = Field(default=0.5, gt=0, lt=1)
    ratio_high: float = Field(default=2.0, gt=1)
    tau: float = Field(default=0.01, ge=0)  # weight of the squared log-ratio
    anchor: Anchor = (
        "behaviour"  # what the square pulls to: each token's own mu, or the policy the iteration began with
    )

    def __call__(self, tokens: Tokens) -> Tensor:
        gain_N = (ratio(tokens) * tokens.advantage_N).masked_fill(self.clipped(tokens), 0.0)
        return -(gain_N - self.tau * (tokens.logp_N - tokens.anchor(self.anchor)).square()).sum()

    def clipped(self, tokens: Tokens) -> Tensor:
        return outside(ratio(tokens), self.ratio_low, self.ratio_high)


class PPO(Table):
    """PPO's clip, with w = sg(anchor / mu) and r = pi / anchor: w min(r A, clip(r, 1 - low, 1 + high) A).

    Anchored on mu this is the plain clip (w = 1); anchored on pi_old it is the decoupled one (AReaL), which corrects
    for staleness by w and limits the step by r. One side is limited per sign of A: with A < 0 a large r is unbounded.
    """

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    anchor: Anchor = "behaviour"

    def __call__(self, tokens: Tokens) -> Tensor:
        ratio_N = (tokens.logp_N - tokens.anchor(self.anchor)).exp()
        return -(self.weight(tokens) * pessimistic(ratio_N, tokens.advantage_N, self.clip_low, self.clip_high)).sum()

    def weight(self, tokens: Tokens) -> Tensor:
        return (tokens.anchor(self.anchor) - tokens.behaviour_N).exp()

    def clipped(self, tokens: Tokens) -> Tensor:
        ratio_N = (tokens.logp_N - tokens.anchor(self.anchor)).exp()
        return flat(ratio_N, tokens.advantage_N, self.clip_low, self.clip_high)


class TIS(PPO):
    """Truncated importance sampling: PPO's clip on pi / pi_old, weighted by min(pi_old / mu, cap)."""

    anchor: Anchor = "proximal"
    cap: float = Field(default=2.0, gt=0)

    def weight(self, tokens: Tokens) -> Tensor:
        return super().weight(tokens).clamp(max=self.cap)

    def clipped(self, tokens: Tokens) -> Tensor:
        return super().clipped(tokens) | (super().weight(tokens) > self.cap)


class IcePop(PPO):
    """PPO's clip on pi / pi_old, weighted by pi_old / mu where that lies in [low, high] and by 0 elsewhere."""

    anchor: Anchor = "proximal"
    ratio_low: float = Field(default=0.5, gt=0, lt=1)
    ratio_high: float = Field(default=5.0, gt=1)

    def weight(self, tokens: Tokens) -> Tensor:
        weight_N = super().weight(tokens)
        return weight_N.masked_fill(outside(weight_N, self.ratio_low, self.ratio_high), 0.0)

    def clipped(self, tokens: Tokens) -> Tensor:
        return super().clipped(tokens) | (self.weight(tokens) == 0)


class CISPO(Table):
    """sg(clip(rho, low, high)) A log pi: the weight saturates, and every token keeps a gradient."""

    ratio_low: float = Field(default=0.0, ge=0, lt=1)
    ratio_high: float = Field(default=5.0, gt=1)

    def __call__(self, tokens: Tokens) -> Tensor:
        weight_N = ratio(tokens).detach().clamp(self.ratio_low, self.ratio_high)
        return -(weight_N * tokens.advantage_N * tokens.logp_N).sum()

    def clipped(self, tokens: Tokens) -> Tensor:
        return outside(ratio(tokens), self.ratio_low, self.ratio_high)


class GSPO(Table):
    """Sequence ratio s = exp(mean_t log rho): per row the mean over its tokens of min(s_t A, clip(s_t, ...) A).

    s_t = sg(s) pi / sg(pi) has the sequence's value and its own token's gradient (GSPO-token), which is GSPO where A is
    one number a row. Of a row's length nothing remains: neither in s nor in the row's weight.
    """

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)

    @property
    def per(self) -> Per:
        return "sequence"

    def __call__(self, tokens: Tokens) -> Tensor:
        ratio_N = self.ratio(tokens) * (tokens.logp_N - tokens.logp_N.detach()).exp()
        gain_N = pessimistic(ratio_N, tokens.advantage_N, self.clip_low, self.clip_high)
        return -(gain_N / tokens.row_sum(gain_N.new_ones(gain_N.shape))).sum()

    @staticmethod
    def ratio(tokens: Tokens) -> Tensor:
        return tokens.row_mean(tokens.logp_N.detach() - tokens.behaviour_N).exp()

    def clipped(self, tokens: Tokens) -> Tensor:
        return flat(self.ratio(tokens), tokens.advantage_N, self.clip_low, self.clip_high)


class DPPO(Table):
    """Masked by what the probability moved, d = pi - mu (prime-rl's default): K rho A - tau (log rho)^2.

    K = 0 where A > 0 and d > high, or A <= 0 and d < -low; else 1. A rare token may multiply its probability many
    times, a likely one not.
    """

    moved_low: float = Field(default=0.2, gt=0, le=1)
    moved_high: float = Field(default=0.2, gt=0, le=1)
    tau: float = Field(default=1e-3, ge=0)  # weight of the squared log-ratio

    def __call__(self, tokens: Tokens) -> Tensor:
        gain_N = (ratio(tokens) * tokens.advantage_N).masked_fill(self.clipped(tokens), 0.0)
        return -(gain_N - self.tau * (tokens.logp_N - tokens.behaviour_N).square()).sum()

    def clipped(self, tokens: Tokens) -> Tensor:
        moved_N = (tokens.logp_N.exp() - tokens.behaviour_N.exp()).detach()
        up_N = tokens.advantage_N > 0
        return (up_N & (moved_N > self.moved_high)) | (~up_N & (moved_N < -self.moved_low))


class Mirror(Table):
    """Kimi k1.5's mirror descent, of a whole row y: sum_t A_t log pi(y_t) - tau/2 (log pi(y) - log anchor(y))^2.

    The anchor is the policy that the iteration began with. No importance weight, and a square of a sum: it grows with
    the square of the length. k1.5 also resets its optimiser every iteration; here it keeps its state.
    """

    tau: float = Field(default=0.01, ge=0)
    anchor: Anchor = "proximal"

    @property
    def per(self) -> Per:
        return "sequence"

    def __call__(self, tokens: Tokens) -> Tensor:
        drift_N = tokens.logp_N - tokens.anchor(self.anchor)
        # drift x (sum over its row), added up over tokens, is the square of the row's sum
        return -(tokens.advantage_N * tokens.logp_N - self.tau / 2 * drift_N * tokens.row_sum(drift_N)).sum()

    def clipped(self, tokens: Tokens) -> Tensor:
        return tokens.logp_N.new_zeros(tokens.logp_N.shape).bool()


# ------------------------------------------------------------------------------------------ parts


def ratio(tokens: Tokens) -> Tensor:
    """rho_N = pi / mu."""
    return (tokens.logp_N - tokens.behaviour_N).exp()


def outside(ratio_N: Tensor, low: float, high: float) -> Tensor:
    return (ratio_N < low) | (ratio_N > high)


def pessimistic(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> Tensor:
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A)."""
    return torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - low, 1 + high) * advantage_N)


def flat(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> Tensor:
    """Where `pessimistic` is the clip, a constant."""
    return ((advantage_N > 0) & (ratio_N > 1 + high)) | ((advantage_N < 0) & (ratio_N < 1 - low))
