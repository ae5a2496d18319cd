"""The learner under any objective: what it hands over, what it divides by, and what it reports by version age."""

from __future__ import annotations

import copy

import made
import pytest
import tiny
import torch
from torch import Tensor
from updates import ONE, assert_same, gradient, scored

from nonet.model import Model
from nonet.rl.batch import Scored
from nonet.rl.config import RLConfig
from nonet.rl.learner import Learner
from nonet.rl.objective import GSPO, K25, Mirror, Tokens
from nonet.rl.packing import pack
from nonet.types import Segment


@pytest.fixture(scope="module")
def m() -> Model:
    return tiny.model(mtp_layers=1)


CHOICES = ("k25", "ppo", "tis", "icepop", "cispo", "gspo", "dppo", "mirror")
WIDE = dict(gspo=GSPO(clip_low=0.5, clip_high=0.9), mirror=Mirror(anchor="behaviour"))  # so that drift does something


@pytest.mark.parametrize("name", CHOICES)
def test_micro_batches_shuffling_and_masked_tokens_change_no_objectives_gradient(m, name):
    """verl#2996, verl#1129, slime#1370: with drifted log-probs, the denominators being the minibatch's own."""
    attempts = scored(m, drift=0.4)
    batch = pack(attempts)
    whole, _ = gradient(m, batch, objective=name, micro_tokens=10**6, **WIDE)
    assert_same(whole, gradient(m, batch, objective=name, micro_tokens=1, **WIDE)[0])
    assert_same(whole, gradient(m, pack([attempts[i] for i in (5, 2, 7, 0, 3, 1, 6, 4)]), objective=name, **WIDE)[0])
    batch.behaviour_T[~batch.mask_T] = batch.advantage_T[~batch.mask_T] = -1e6
    masked, _ = gradient(m, batch, objective=name, micro_tokens=10**6, **WIDE)
    assert all(torch.equal(whole[n], masked[n]) for n in whole)


def test_a_sequence_objective_is_divided_by_rows(m):
    """trl#3823: GSPO multiplied by length. At ratio 1 a row's loss is -A, whatever its length."""
    attempts = scored(m)
    _, stats = gradient(m, pack(attempts), objective="gspo")
    assert stats["loss"] == pytest.approx(-sum(s.advantages[0] for s in attempts) / 8, rel=1e-4)


class Recording:
    """A sum of log-probs that notes what it was handed."""

    per = "token"

    def __init__(self, *needs: str):
        self.needs = frozenset(needs)
        self.seen: list[Tokens] = []

    def __call__(self, tokens: Tokens) -> Tensor:
        self.seen.append(tokens)
        return -(tokens.logp_N * tokens.advantage_N).sum()

    def clipped(self, tokens: Tokens) -> Tensor:
        return tokens.advantage_N > 1


def test_proximal_is_the_policy_the_iteration_began_with(m):
    """The first minibatch's is its own log-prob; the others' does not move when the weights do."""
    objective = Recording("proximal")
    learner = Learner(copy.deepcopy(m), RLConfig(**{**ONE, "minibatches": 3, "lr": 5e-2}), objective)
    attempts = scored(m, drift=0.3)
    learner.step(pack(attempts))
    began = {round(x, 3) for s in scored(m) for seg in s.trajectory.segments for x in seg.logprobs}
    first, *others = objective.seen
    assert first.proximal_N is not None
    assert torch.equal(first.proximal_N, first.logp_N)
    for tokens in others:
        assert tokens.proximal_N is not None
        assert not torch.allclose(tokens.proximal_N, tokens.logp_N, atol=1e-2)
        assert not torch.allclose(tokens.proximal_N, tokens.behaviour_N, atol=1e-2)
        assert all(min(abs(x - y) for y in began) < 2e-3 for x in tokens.proximal_N.tolist())


def test_what_is_not_needed_is_not_made(m, monkeypatch):
    forwards: list[int] = []
    forward = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, *a, **k: forwards.append(1) or forward(self, *a, **k))
    count = {}
    for needs, minibatches in (((), 2), (("proximal",), 1), (("proximal",), 2), (("logits",), 2)):
        objective = Recording(*needs)
        learner = Learner(copy.deepcopy(m), RLConfig(**{**ONE, "minibatches": minibatches}), objective)
        batch = pack(scored(m))
        forwards.clear()
        learner.step(batch)
        count[needs, minibatches] = len(forwards)
        assert all((t.proximal_N is not None) == ("proximal" in needs) for t in objective.seen)
        assert all((t.logits_NW is not None) == ("logits" in needs) for t in objective.seen)
    assert list(count.values()) == [2, 1, 3, 2]


def test_logits_rows_and_the_teacher_speak_of_the_same_tokens(m):
    objective = Recording("logits")
    learner = Learner(copy.deepcopy(m), RLConfig(**ONE, temperature=0.7, micro_tokens=40), objective)
    learner.teacher = lambda part, names: (part, list(names))
    attempts = scored(m)
    learner.step(pack(attempts))
    assert len(objective.seen) > 1
    for tokens in objective.seen:
        part, names = tokens.teacher
        assert tokens.logits_NW is not None
        picked = tokens.logits_NW.log_softmax(-1).gather(1, part.target_N[:, None])[:, 0]
        torch.testing.assert_close(picked, tokens.logp_N)
        lengths = {f"{s.trajectory.task_id} {s.trajectory.id}": s.trajectory.policy_tokens for s in attempts}
        assert tokens.row_N.bincount().tolist() == [lengths[n] for n in names]


def test_figures_by_age_are_those_counted_by_hand(m):
    """slime PR#2092: tokens of versions [2, 4, 6] in one sample stay apart."""
    t = made.trajectory(parts=[("prompt", 2)])
    for version, n in ((2, 2), (4, 3), (6, 4)):
        t.append(Segment("policy", tuple(range(n)), (-4.0,) * n, (-4.0,) * n, version))
    learner = Learner(copy.deepcopy(m), RLConfig(**ONE, k25=K25(ratio_low=0.3, ratio_high=1.2, tau=0.05)))
    learner.version = 6
    logits = m.logits(m(torch.tensor([t.tokens])))[0, 1:-1].log_softmax(-1)
    ratio = (logits.gather(1, torch.tensor(t.tokens[2:])[:, None])[:, 0] + 4.0).detach().exp()
    inside = (ratio >= 0.3) & (ratio <= 1.2)
    pull = (0.5 * ratio * inside - 2 * 0.05 * ratio.log()).abs()
    ages = learner.step(pack([Scored.uniform(t, 0.5)]))["ages"]
    assert [(a["age"], a["tokens"]) for a in ages] == [(0, 4), (2, 3), (4, 2)]
    for a, cut in zip(ages, (slice(5, 9), slice(2, 5), slice(0, 2)), strict=True):
        assert a["clipped"] == pytest.approx(1 - float(inside[cut].float().mean()))
        assert a["ratio_p50"] == pytest.approx(float(ratio[cut].quantile(0.5)), rel=1e-4)
        assert a["ratio_p05"] <= a["ratio_p50"] <= a["ratio_p95"]
        assert a["grad_share"] == pytest.approx(float(pull[cut].sum() / pull.sum()), rel=1e-3)
    assert 0 < sum(a["clipped"] for a in ages) < 3
    assert sum(a["grad_share"] for a in ages) == pytest.approx(1)
