"""What must hold of all that is trained. A breach stops the run and shows the sample, the place and both values.

ids equal      the batch holds the very tokens of the trajectory, in order
mask           trained is what the policy wrote, all of it and nothing else: no prompt, no tool token, no padding
log-probs      every trained token carries a finite behaviour log-prob and advantage
budget         over all turns and pauses a trajectory's policy tokens stay within rl.max_tokens
group          as many members as rl.samples, each sibling once
ratio          fresh tokens score what they were sampled with (equal weights)
finite         loss and gradient are numbers
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nonet.rl.batch import PackedBatch
from nonet.types import Trajectory

NEAR_TIES = 0.01


class InvariantError(RuntimeError):
    """Something the loop relies on is false; the message shows the offending sample."""


def check_group(group: Sequence[Trajectory], samples: int) -> None:
    """A group is dispatched whole: its siblings are 0 .. samples - 1 of one task and have ended."""
    number = group[0].group if group else "?"
    found = sorted(t.sample for t in group)
    if found != list(range(samples)):
        raise InvariantError(f"group {number}: its members are {found}, not {samples} siblings 0 to {samples - 1}")
    for t in group:
        if (t.group, t.task_id) != (number, group[0].task_id):
            raise InvariantError(f"group {number} of {group[0].task_id}: holds {t.id} of {t.task_id}")
        if t.status not in ("done", "failed"):
            raise InvariantError(f"{t.task_id} {t.id}: released while {t.status}, before it is done or failed")


def check_budget(t: Trajectory, budget: int) -> None:
    if t.policy_tokens > budget:
        parts = " + ".join(str(len(s.tokens)) for s in t.segments if s.author == "policy")
        raise InvariantError(
            f"{t.task_id} {t.id}: wrote {parts} = {t.policy_tokens} policy tokens over its segments; "
            f"its budget is {budget}"
        )


def check_row(batch: PackedBatch, row: int, t: Trajectory) -> None:
    """A packed row against the trajectory it came from, token by token."""
    cut, name = slice(batch.starts[row], batch.starts[row + 1]), batch.names[row]
    _equal(name, "id", batch.tokens_T[cut].tolist(), [token for s in t.segments for token in s.tokens])
    authors = [s.author for s in t.segments for _ in s.tokens]
    written = [author == "policy" for author in authors]
    masked = batch.mask_T[cut].tolist()
    for i, (trained, policy) in enumerate(zip(masked, written, strict=True)):
        if trained != policy:
            what = "trained" if trained else "not trained"
            raise InvariantError(f"{name}: token {i} (id {int(batch.tokens_T[cut][i])}) of the {authors[i]} is {what}")
    if sum(masked) != t.policy_tokens or not t.policy_tokens:
        raise InvariantError(f"{name}: {sum(masked)} trained tokens of {t.policy_tokens} that the policy wrote")
    if masked[0]:
        raise InvariantError(
            f"{name}: token 0 is the policy's, but nothing precedes it: a trajectory opens with a prompt"
        )


def check_columns(batch: PackedBatch) -> None:
    """Before an update, whoever made the batch: what is trained is the policy's, with log-prob and advantage."""
    checks = (
        (batch.version_T < 0, "version", batch.version_T, "is trained, but no policy version wrote it"),
        (~batch.behaviour_T.isfinite(), "log-prob", batch.behaviour_T, "is trained without a finite log-prob"),
        (batch.behaviour_T > 0, "log-prob", batch.behaviour_T, "is trained with a log-prob above zero"),
        (~batch.advantage_T.isfinite(), "advantage", batch.advantage_T, "is trained without a finite advantage"),
    )
    for wrong_T, what, value_T, sentence in checks:
        found = (wrong_T & batch.mask_T).nonzero()
        if len(found):
            at = int(found[0])
            raise InvariantError(f"{place(batch, at)} {sentence} ({what} {value_T[at].item()})")


def check_count(counted: int, expected: int, names: Sequence[str]) -> None:
    """The tokens that entered the loss are those in its denominator."""
    if counted != expected:
        raise InvariantError(f"{names[0]} and {len(names) - 1} more: {counted} tokens in the loss, {expected} under it")


def check_ratio(
    batch: PackedBatch, index_N: Tensor, log_ratio_N: Tensor, version: int, limit: float, moe: bool
) -> None:
    """On equal weights the learner must reproduce the sampler's log-probs; if not, some input differs from what was
    seen. With routed experts a share of NEAR_TIES may differ: where two experts score alike to the last bits, sampler
    and learner, which sum in another order, choose differently.

    index_N: where in the batch the N trained tokens are; version: of the weights that scored them.
    """
    fresh_N = batch.version_T[index_N] == version
    drift_N = log_ratio_N.abs() * fresh_N
    allowed = int(NEAR_TIES * int(fresh_N.sum())) if moe else 0
    if bool(drift_N.isfinite().all()) and int((drift_N > limit).sum()) <= allowed:
        return
    worst = int(drift_N.nan_to_num(nan=math.inf).argmax())
    at = int(index_N[worst])
    raise InvariantError(
        f"{place(batch, at)} was sampled at log-prob {float(batch.behaviour_T[at]):.4f} but scores "
        f"{float(drift_N[worst]):.4f} away from it under the same weights"
    )


def check_finite(batch: PackedBatch, index_N: Tensor, loss: Tensor, log_ratio_N: Tensor) -> None:
    if bool(loss.isfinite()):
        return
    at = int(index_N[int(log_ratio_N.abs().nan_to_num(nan=math.inf).argmax())])
    raise InvariantError(
        f"{place(batch, at)} has the largest log-ratio, {float(log_ratio_N.abs().max()):.1f} from its log-prob "
        f"{float(batch.behaviour_T[at]):.4f}, in a micro-batch whose loss is {float(loss)}"
    )


def check_norm(norm: float, names: Sequence[str]) -> None:
    """After the update, which has spoiled the weights in memory: nobody saves them."""
    if not math.isfinite(norm):
        raise InvariantError(
            f"{names[0]} and {len(names) - 1} more: the gradient's norm is {norm}; its loss was finite"
        )


def place(batch: PackedBatch, at: int) -> str:
    """Sample, index in its row and id of the token at flat index `at`."""
    row = int(torch.searchsorted(torch.tensor(batch.starts), at, right=True)) - 1
    return f"{batch.names[row]}: token {at - batch.starts[row]} (id {int(batch.tokens_T[at])})"


def _equal(name: str, what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if found == expected:
        return
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected)))
    a, b = (x[at] if at < len(x) else "nothing" for x in (found, expected))
    raise InvariantError(f"{name}: token {at} is packed as {what} {a}, but the trajectory has {b} there")
