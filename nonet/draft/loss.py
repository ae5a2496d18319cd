"""What an unrolled draft is told: the loss of all its steps in one call, and the acceptance it would have had.

The target's distribution at step s, row t is that of its hidden state at position t + s: shifts of one array, of which
neither logits nor probabilities are kept. Rows of all steps go through `ops.overlap` together, so one gradient of the
head exists; rows that predict nothing the mask marks are left out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.draft.batch import FeatureBatch
from nonet.draft.model import Draft
from nonet.draft.unroll import unrolled
from nonet.model import Model
from nonet.ops.overlap import overlap
from nonet.ops.overlap_blocks import Head, log_total
from nonet.ops.overlap_rules import Kind


@dataclass(frozen=True)
class Objective:
    """kind, eta, fallback: of ops.overlap. step_weights: one for each unrolled step, or a base b for b^(s - 1)."""

    kind: Kind = "overlap"
    eta: float = 3.0
    fallback: float = 0.1
    step_weights: float | Sequence[float] = 1.0

    def weight(self, step: int) -> float:
        """Of step 1, 2, ..."""
        given = self.step_weights
        return float(given ** (step - 1)) if isinstance(given, float | int) else float(given[step - 1])


class Teacher:
    """The frozen target's head, as a draft sees it: rows of the draft's words, made once. temperature: of the target's
    distributions, and of the draft's that are compared with them.
    """

    def __init__(self, target: Model, d2t_W: Tensor | None, temperature: float = 1.0):
        self.target, self.temperature = target, temperature
        self._head_VD = target.lm_head.weight.detach()
        self._words_WD = self._head_VD if d2t_W is None else self._head_VD[d2t_W]
        self._narrow_WD = self._words_WD.bfloat16()

    def words(self, bf16: bool) -> Tensor:
        """The target's head, rows of the draft's words."""
        return self._narrow_WD if bf16 else self._words_WD

    @torch.no_grad()
    def head(self, batch: FeatureBatch, places_N: Tensor, bf16: bool) -> Head:
        """Its distributions at places of the flattened batch. A known batch.lse_BT saves work on all other tokens."""
        normed_MD = self.target.norm(batch.hidden_BTD.flatten(0, 1).to(self._head_VD.dtype))
        words_WD = self.words(bf16)
        if len(words_WD) == len(self._head_VD):
            lse_N = None
        elif batch.lse_BT is not None:
            lse_N = batch.lse_BT.flatten()[places_N]
        else:
            needed_U, index_N = places_N.unique(return_inverse=True)
            lse_N = log_total(Head(normed_MD[needed_U], self._head_VD, self.temperature))[index_N]
        return Head(normed_MD.to(words_WD.dtype)[places_N], words_WD, self.temperature, lse_N)


@dataclass(frozen=True)
class Told:
    """loss over all steps (None: no row of the batch predicts anything), and the overlap of each chain's steps,
    alpha_BTK: nan where row t makes no prediction at step k + 1.
    """

    loss: Tensor | None
    alpha_BTK: Tensor


def weight_of(batch: FeatureBatch, steps: int, objective: Objective) -> float:
    """Sum of the weights of a batch's predictions."""
    last = min(steps, batch.tokens_BT.shape[1] - 1)
    return sum(objective.weight(step) * int(batch.predicted(step).sum()) for step in range(1, last + 1))


def told(
    draft: Draft, teacher: Teacher, batch: FeatureBatch, steps: int, objective: Objective, bf16: bool = False
) -> Told:
    """bf16: matrix products in bfloat16."""
    B, T = batch.tokens_BT.shape
    alpha_BTK = batch.hidden_BTD.new_full((B, T, steps), torch.nan, dtype=torch.float32)
    hidden, at, weights = [], [], []
    with torch.autocast(batch.tokens_BT.device.type, torch.bfloat16, enabled=bf16):
        for step, out_BRD in enumerate(unrolled(draft, batch, steps), 1):
            row_N, time_N = batch.predicted(step).nonzero(as_tuple=True)
            hidden.append(out_BRD[row_N, time_N])
            at.append(torch.stack([row_N, time_N, torch.full_like(row_N, step - 1)]))
            weights.append(torch.full_like(row_N, 1, dtype=torch.float32) * objective.weight(step))
    if not sum(map(len, weights)):
        return Told(None, alpha_BTK)
    row_N, time_N, index_N = torch.cat(at, 1)
    weight_WD = draft.lm_head.weight if draft.own_head else teacher.words(bf16)
    own = Head(draft.final_norm(torch.cat(hidden)), weight_WD, teacher.temperature)
    if bf16:
        own = own._replace(hidden_TD=own.hidden_TD.bfloat16(), weight_WD=weight_WD.bfloat16())
    theirs = teacher.head(batch, row_N * T + time_N + index_N + 1, bf16)
    o = objective
    found = overlap(own, theirs, None, torch.cat(weights), kind=o.kind, eta=o.eta, fallback=o.fallback)
    alpha_BTK[row_N, time_N, index_N] = found.alpha_T.float()
    return Told(found.mean, alpha_BTK)


@dataclass
class Acceptance:
    """Sums over chains of the training-time acceptance: teacher-forced, with min(p, q) as a verifier would accept.

    A chain starts at every row whose first prediction counts. Its k-th token is accepted if all before it are: the
    product of its steps' overlaps. Position k's mean is over the chains that reach it, since an answer's last tokens
    have fewer after them.
    """

    steps: int

    def __post_init__(self) -> None:
        self._sum_K = torch.zeros(self.steps, dtype=torch.float64)
        self._count_K = torch.zeros(self.steps, dtype=torch.float64)

    def add(self, alpha_BTK: Tensor) -> None:
        joint_BTK = alpha_BTK.double().cumprod(-1)  # nan from the first step that is not there
        there = joint_BTK.isfinite()
        self._sum_K += torch.where(there, joint_BTK, 0).sum((0, 1))
        self._count_K += there.sum((0, 1))

    @property
    def positions(self) -> list[float]:
        """Share of chains whose 1st, 2nd, ... token is accepted, with all before it."""
        return (self._sum_K / self._count_K.clamp(min=1)).tolist()

    @property
    def length(self) -> float:
        """Expected tokens of one verification, the target's own (bonus) token included: 1 to steps + 1."""
        return 1 + sum(self.positions)

    @property
    def chains(self) -> int:
        return int(self._count_K[0])
