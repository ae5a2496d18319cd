"""Each invariant, broken alone: the run stops, and the message shows the sample, the token and both values."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace

import made
import pytest
import tiny

from nonet.model import Model
from nonet.rl.advantage import GroupMean
from nonet.rl.batch import PackedBatch, Scored
from nonet.rl.config import RLConfig
from nonet.rl.invariants import InvariantError, check_count, check_row
from nonet.rl.learner import Learner
from nonet.rl.packing import pack
from nonet.types import Segment, Trajectory

PARTS = [("prompt", 2), ("policy", 2), ("tool", 2), ("policy", 1)]
CONFIG = RLConfig(minibatches=1, warmup=0)


@pytest.fixture(scope="module")
def m() -> Model:
    return tiny.model()


def attempt(m: Model, sample: int = 0) -> Trajectory:
    return made.written_by(m, made.trajectory(3, sample, PARTS))


def learn(m: Model, batch: PackedBatch) -> None:
    Learner(copy.deepcopy(m), CONFIG).step(batch)


def test_nothing_is_raised_where_nothing_is_wrong(m):
    learn(m, pack([Scored.uniform(attempt(m, i), 1.0) for i in range(2)], budget=3))
    GroupMean(3)([made.group([1, 0, None])])


# ------------------------------------------------------------------------------ packing


def broken(column: str, at: int, value: float) -> Callable[[PackedBatch], None]:
    def corrupt(batch: PackedBatch) -> None:
        getattr(batch, column)[at] = value

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (broken("tokens_T", 3, 60), r"token 3 is packed as id 60, but the trajectory has \d+ there"),
        (broken("mask_T", 4, True), r"token 4 \(id \d+\) of the tool is trained"),
        (broken("mask_T", 1, True), r"token 1 \(id \d+\) of the prompt is trained"),
        (broken("mask_T", 6, False), r"token 6 \(id \d+\) of the policy is not trained"),
    ],
)
def test_a_row_that_differs_from_its_trajectory(m, corrupt, sentence):
    """ids equal, mask sums, no tool token in the loss (slime#1370, OpenRLHF#1243)."""
    t = attempt(m)
    batch = pack([Scored.uniform(attempt(m, 1), 1.0), Scored.uniform(t, 1.0)])
    check_row(batch, 1, t)
    batch.tokens_T, batch.mask_T = batch.tokens_T.clone(), batch.mask_T.clone()
    corrupt(Shifted(batch, batch.starts[1]))  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="task 3 group=3/sample=0: " + sentence):
        check_row(batch, 1, t)


class Shifted:
    """A batch whose columns begin at an offset."""

    def __init__(self, batch: PackedBatch, offset: int):
        self.tokens_T, self.mask_T = batch.tokens_T[offset:], batch.mask_T[offset:]


def test_a_row_of_another_length(m):
    t = attempt(m)
    batch = pack([Scored.uniform(t, 1.0)])
    t.append(Segment("tool", (9, 9)))
    with pytest.raises(InvariantError, match="token 7 is packed as id nothing, but the trajectory has 9 there"):
        check_row(batch, 0, t)


def test_a_trajectory_without_a_prompt_has_a_token_that_nothing_predicts(m):
    t = made.trajectory(3, 0, [("policy", 2)])
    with pytest.raises(InvariantError, match="sample=0: token 0 is the policy's, but nothing precedes it"):
        pack([Scored.uniform(t, 1.0)])


def test_an_advantage_too_few(m):
    with pytest.raises(InvariantError, match="task 3 group=3/sample=0: 2 advantages for 3 policy tokens"):
        pack([Scored(attempt(m), (1.0, 1.0))])


def test_the_budget_is_one_number_over_all_pauses():
    """slime#2260, verl#7207: a continuation got the full budget again."""
    t = made.trajectory(3, 1, [("prompt", 2)])
    for version, n in enumerate((2, 3, 3)):
        t.append(Segment("policy", tuple(range(n)), (-1.0,) * n, (-1.0,) * n, version))
    pack([Scored.uniform(t, 1.0)], budget=8)
    sentence = "task 3 group=3/sample=1: wrote 2 + 3 + 3 = 8 policy tokens over its segments; its budget is 7"
    with pytest.raises(InvariantError, match=re.escape(sentence)):
        pack([Scored.uniform(t, 1.0)], budget=7)


# ------------------------------------------------------------------------------- groups


def test_a_group_is_whole_of_one_task_and_ended():
    whole = made.group([1, 0, 1], 5)
    for wrong, sentence in (
        (whole[:2], r"group 5: its members are \[0, 1\], not 3 siblings 0 to 2"),
        ([*whole[:2], whole[1]], r"group 5: its members are \[0, 1, 1\]"),
        ([*whole[:2], replace(whole[2], group=6)], "group 5 of task 5: holds group=6/sample=2 of task 5"),
        ([*whole[:2], replace(whole[2], task_id="task 9")], "group 5 of task 5: holds group=5/sample=2 of task 9"),
        ([*whole[:2], replace(whole[2], status="parked")], "task 5 group=5/sample=2: released while parked"),
    ):
        with pytest.raises(InvariantError, match=sentence):
            GroupMean(3)([wrong])


# ------------------------------------------------------------------------------- updates


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("version_T", -1, "is trained, but no policy version wrote it (version -1)"),
        ("behaviour_T", math.nan, "is trained without a finite log-prob (log-prob nan)"),
        ("behaviour_T", 0.25, "is trained with a log-prob above zero (log-prob 0.25)"),
        ("advantage_T", math.inf, "is trained without a finite advantage (advantage inf)"),
    ],
)
def test_a_trained_token_without_what_it_needs(m, column, value, sentence):
    """verl#2953: importance weights without log-probs were silently off; here TIS and IcePop get no batch at all."""
    batch = pack([Scored.uniform(attempt(m, i), 1.0) for i in range(2)])
    getattr(batch, column)[7 + 6] = value
    token = int(batch.tokens_T[13])
    with pytest.raises(InvariantError) as caught:
        learn(m, batch)
    assert str(caught.value) == f"task 3 group=3/sample=1: token 6 (id {token}) {sentence}"


def test_a_policy_segment_without_log_probs_cannot_be_made():
    """verl#2953, SkyRL#758, rllm#816: missing log-probs are refused where they would enter, not padded with 0.0."""
    with pytest.raises(ValueError, match="policy segment of 2 tokens carries 0 behaviour and 0 raw log-probs"):
        Segment("policy", (1, 2))


def test_a_tool_token_smuggled_into_the_mask(m):
    batch = pack([Scored.uniform(attempt(m), 1.0)])
    batch.mask_T[5] = True
    with pytest.raises(InvariantError, match=r"token 5 \(id \d+\) is trained, but no policy version wrote it"):
        learn(m, batch)


def test_a_mask_that_counts_a_token_nothing_predicts(m):
    """The first token of a row has no logits: it would be in the denominator and not in the loss."""
    batch = pack([Scored.uniform(attempt(m), 1.0)])
    batch.mask_T[0], batch.version_T[0] = True, 0
    with pytest.raises(InvariantError, match="3 tokens in the loss, 4 under it"):
        learn(m, batch)
    with pytest.raises(InvariantError, match="task 1 and 1 more: 5 tokens in the loss, 6 under it"):
        check_count(5, 6, ["task 1", "task 2"])


def test_the_ratio_on_equal_weights_shows_place_and_both_values(m):
    batch = pack([Scored.uniform(attempt(m, i), 1.0) for i in range(2)])
    batch.behaviour_T[7 + 2] -= 0.5
    said = f"{float(batch.behaviour_T[9]):.4f}"
    with pytest.raises(InvariantError) as caught:
        learn(m, batch)
    assert "task 3 group=3/sample=1: token 2 (id " in str(caught.value)
    assert f"was sampled at log-prob {said} but scores 0.5000 away from it under the same weights" in str(caught.value)


def test_a_loss_that_is_no_number_shows_the_largest_log_ratio(m):
    batch = pack([Scored.uniform(attempt(m, i), -1.0) for i in range(2)])
    batch.behaviour_T[7 + 3] = -1e4
    learner = Learner(copy.deepcopy(m), RLConfig(minibatches=1, objective="ppo"))
    learner.version = 1
    with pytest.raises(InvariantError, match=r"task 3 group=3/sample=1: token 3 .* in a micro-batch whose loss is inf"):
        learner.step(batch)


def test_a_gradient_that_is_no_number_stops_the_run(m):
    learner = Learner(copy.deepcopy(m), CONFIG)
    learner.model.norm.weight.register_hook(lambda g: g * math.nan)
    with pytest.raises(InvariantError, match="the gradient's norm is nan"):
        learner.step(pack([Scored.uniform(attempt(m), 1.0)]))
