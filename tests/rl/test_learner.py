"""One update: exact ratios, denominators that count policy tokens, gradients that masked tokens cannot move."""

from __future__ import annotations

import copy
import math

import made
import pytest
import tiny
import torch
from torch import Tensor
from updates import ONE, assert_same, gradient, scored

from nonet.engine import Engine
from nonet.model import Model
from nonet.rl.batch import PackedBatch, Scored
from nonet.rl.config import RLConfig
from nonet.rl.invariants import InvariantError
from nonet.rl.learner import Learner
from nonet.rl.objective import K25
from nonet.rl.packing import pack
from nonet.types import Request, Sampling, Segment, Trajectory


@pytest.fixture(scope="module")
def m() -> Model:
    return tiny.model(mtp_layers=1)


# --------------------------------------------------------------------- ratios on equal weights


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_ratio_is_one_on_equal_weights(kind, temperature):
    """trl#4159: log-probs of a sampler at temperature 0.6 against a learner at temperature 1."""
    m = tiny.model(kind)
    engine, attempts = Engine(m), []
    for i in range(6):
        prompt = tuple(tiny.tokens(3 + 2 * i, seed=i).tolist())
        engine.submit(Request(str(i), prompt, 10 + i, sampling=Sampling(temperature, seed=i)))
        attempts.append(Trajectory("t", i, 0, [Segment("prompt", prompt)], status="done"))
    for c in engine.run():
        attempts[int(c.id)].append(Segment("policy", c.tokens, c.logprobs, c.raw_logprobs, c.policy_version))
    batch = pack([Scored.uniform(t, 1.0) for t in attempts])
    stats = Learner(copy.deepcopy(m), RLConfig(temperature=temperature, minibatches=1, check_ratio=1e-4)).step(batch)
    assert abs(stats["ratio_min"] - 1) < 1e-4
    assert abs(stats["ratio_max"] - 1) < 1e-4
    assert (stats["stale"], stats["masked"]) == (0, 0)
    other = RLConfig(temperature=temperature * 1.3, minibatches=1)
    with pytest.raises(InvariantError):
        Learner(copy.deepcopy(m), other).step(batch)


def test_a_corrupted_logprob_stops_the_run_and_names_the_sample(m):
    attempts = scored(m)
    t = attempts[5].trajectory
    s = t.segments[3]
    wrong = (s.logprobs[0], s.logprobs[1] - 0.5)
    t.segments[3] = Segment("policy", s.tokens, wrong, s.raw_logprobs, s.policy_version)
    where = len(t.tokens) - 1
    learner = Learner(copy.deepcopy(m), RLConfig(minibatches=1))
    with pytest.raises(InvariantError) as caught:
        learner.step(pack(attempts))
    assert f"task 1 group=1/sample=1: token {where} (id {s.tokens[1]})" in str(caught.value)
    assert "0.5" in str(caught.value)
    assert f"{wrong[1]:.4f}" in str(caught.value)


def test_a_nan_logprob_stops_the_run_too(m):
    attempts = scored(m)
    t = attempts[0].trajectory
    s = t.segments[1]
    t.segments[1] = Segment("policy", s.tokens, (math.nan, *s.logprobs[1:]), s.raw_logprobs, 0)
    with pytest.raises(InvariantError):
        Learner(copy.deepcopy(m), RLConfig(minibatches=1)).step(pack(attempts))


def test_routed_experts_may_differ_on_a_few_tokens_but_not_on_a_whole_attempt():
    """Near-ties between experts: less than 1% of fresh tokens may be off; one foreign attempt is far more."""
    m = tiny.model("k3")

    def off(attempts: int, tokens: int) -> PackedBatch:
        rows = scored(m, 40)
        for t in (r.trajectory for r in rows[:attempts]):
            s = t.segments[1]
            moved = tuple(x - 0.5 * (i < tokens) for i, x in enumerate(s.logprobs))
            t.segments[1] = Segment("policy", s.tokens, moved, s.raw_logprobs, s.policy_version)
        return pack(rows)

    config = RLConfig(minibatches=1, micro_tokens=10**6)
    assert off(1, 1).trained_tokens >= 200
    Learner(copy.deepcopy(m), config).step(off(1, 1))
    with pytest.raises(InvariantError):
        Learner(copy.deepcopy(m), config).step(off(2, 10**6))


def test_stale_tokens_are_allowed_to_have_drifted(m):
    learner = Learner(copy.deepcopy(m), RLConfig(minibatches=1))
    learner.version = 3  # everything in the batch was written by version 0
    stats = learner.step(pack(scored(m, drift=0.5)))
    assert stats["stale"] == 1
    assert stats["ratio_max"] > 1.1


# ------------------------------------------------------------------------------- denominators


def test_the_loss_is_the_objective_over_all_policy_tokens_and_no_others(m):
    """trl#6367, #6369, #3823: who is in the denominator. At ratio 1 the loss is -(sum of A) / (policy tokens)."""
    attempts = scored(m)
    tokens = sum(s.trajectory.policy_tokens for s in attempts)
    expected = -sum(sum(s.advantages) for s in attempts) / tokens
    _, stats = gradient(m, pack(attempts))
    assert stats["loss"] == pytest.approx(expected, rel=1e-4)
    assert stats["trained_tokens"] == tokens


@pytest.mark.parametrize("drift", [0.0, 0.4])
def test_micro_batches_of_one_and_of_eight_rows_give_the_same_gradient(m, drift):
    """verl#2996, #6280."""
    batch = pack(scored(m, drift=drift))
    one, one_stats = gradient(m, batch, micro_tokens=1)
    eight, eight_stats = gradient(m, batch, micro_tokens=10**6)
    assert_same(one, eight)
    assert one_stats["loss"] == pytest.approx(eight_stats["loss"], rel=1e-5)


def test_shuffling_rows_gives_the_same_gradient(m):
    attempts = scored(m, drift=0.3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(5)).tolist()
    assert_same(gradient(m, pack(attempts))[0], gradient(m, pack([attempts[i] for i in order]))[0])


@pytest.mark.parametrize("field", ["behaviour_T", "advantage_T"])
def test_nothing_on_prompt_or_tool_tokens_moves_the_gradient(m, field):
    """Soup#723, slime#1370: a huge value on a masked token leaked into the loss."""
    batch = pack(scored(m, drift=0.3))
    before, _ = gradient(m, batch)
    getattr(batch, field)[~batch.mask_T] = -1e6
    after, _ = gradient(m, batch)
    assert all(torch.equal(before[name], after[name]) for name in before)
    getattr(batch, field)[batch.mask_T] -= 0.1
    moved, _ = gradient(m, batch)
    assert any(not torch.equal(before[name], moved[name]) for name in before)


def test_the_gradient_is_that_of_a_plain_double_loop(m):
    """Written out token by token: log pi at the temperature, K25 by formula, one global denominator."""
    wide = copy.deepcopy(m).double()
    attempts, c = scored(m, 4, drift=0.4), RLConfig(**ONE, temperature=0.8, k25=K25(tau=0.2))
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for t, a in ((s.trajectory, s.advantages[0]) for s in attempts):
        logits = wide.logits(wide(torch.tensor([t.tokens])))[0] / c.temperature
        at = 0
        for s in t.segments:
            for token, mu in zip(s.tokens, s.logprobs, strict=False):
                log_ratio = logits[at - 1].log_softmax(-1)[token] - torch.tensor(mu, dtype=torch.float32).double()
                rho = log_ratio.exp()
                if c.k25.ratio_low <= rho <= c.k25.ratio_high:
                    loss = loss - rho * a
                loss = loss + c.k25.tau * log_ratio**2
                count += 1
                at += 1
            at += len(s.tokens) if s.author != "policy" else 0
    (loss / count).backward()
    expected = {n: p.grad.float() for n, p in wide.named_parameters() if p.grad is not None}
    assert_same(gradient(m, pack(attempts), temperature=0.8, k25=K25(tau=0.2))[0], expected, rtol=1e-3)


# ------------------------------------------------------------------------------- pad, EOS, versions


def test_masks_come_from_segments_whatever_the_ids(m):
    """trl#6357, #2708, #4970, #7039: pad == eos, two EOS ids, an EOS inside the prompt: the ids decide nothing."""
    eos, other, pad = 0, 7, 0  # rows are padded with 0

    def row(sample: int, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Scored:
        blank = (0.0,) * len(answer)
        t = Trajectory("t", 0, sample, [Segment("prompt", prompt), Segment("policy", answer, blank, blank, 0)])
        return Scored.uniform(made.written_by(m, t), 1.0)

    rows = [row(0, (eos, 5, pad), (9, 4, eos)), row(1, (3, other, 5), (other,)), row(2, (2,), (eos, 8, pad, 8, other))]
    batch = pack(rows)
    assert batch.tokens_T[batch.mask_T].tolist() == [9, 4, 0, 7, 0, 8, 0, 8, 7]  # each sampled EOS is trained
    learner = Learner(copy.deepcopy(m), RLConfig(minibatches=1, check_ratio=1e-4))  # and at the log-prob it was drawn
    assert learner.step(batch)["trained_tokens"] == 9


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_prompts_read_once_give_the_gradient_of_rows_read_alone(kind):
    """Groups of samples of one prompt, beside a prompt of its own."""
    m = tiny.model(kind, dtype=torch.float64)
    rows = []
    for group, samples in ((0, 3), (1, 1), (2, 2)):
        prompt = tuple(tiny.tokens(4 + 9 * group, seed=group).tolist())
        for k in range(samples):
            answer = tuple(tiny.tokens(1 + 5 * k, seed=10 * group + k).tolist())
            blank = (0.0,) * len(answer)
            parts = [Segment("prompt", prompt), Segment("policy", answer, blank, blank, 0), Segment("tool", (3, 4))]
            rows.append(Scored.uniform(made.written_by(m, Trajectory("t", group, k, parts)), 1.0 - k))
    batch = pack(rows)
    together = batch.part(range(6))
    assert together.tokens_1L.shape[1] == 4 + 13 + 22 + sum(max(1, 5 * k) for k in (0, 1, 2, 0, 0, 1))
    one, stats = gradient(m, batch)
    alone, alone_stats = gradient(m, batch, share_prompts=False, micro_tokens=1)
    assert_same(one, alone)
    assert stats["trained_tokens"] == alone_stats["trained_tokens"] == 26
    assert stats["loss"] == pytest.approx(alone_stats["loss"], rel=1e-6)
    assert abs(stats["ratio_max"] - 1) < 1e-6 > abs(stats["ratio_min"] - 1)


# ------------------------------------------------------------------------------- steps


def weights(learner: Learner) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in learner.model.named_parameters()}


def test_an_empty_batch_changes_nothing_but_the_version(m):
    learner = Learner(copy.deepcopy(m), RLConfig(weight_decay=0.1))
    learner.step(pack(scored(m)))
    before, state = weights(learner), copy.deepcopy(learner.optimizer.state_dict())
    stats = learner.step(pack([]))
    assert learner.version == 2
    assert all(torch.equal(before[n], p) for n, p in weights(learner).items())
    assert str(learner.optimizer.state_dict()) == str(state)
    assert (stats["updates"], stats["trained_tokens"], stats["loss"]) == (0, 0, 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rl_leaves_the_mtp_layer_alone_and_moves_everything_else(m, optimizer):
    """The layer is carried along: with weight decay too."""
    learner = Learner(copy.deepcopy(m), RLConfig(lr=1e-2, weight_decay=0.1, warmup=0, optimizer=optimizer))
    before = weights(learner)
    learner.step(pack(scored(m)))
    for name, p in weights(learner).items():
        assert torch.equal(before[name], p) == name.startswith("mtp."), name


def test_tau_acts_on_the_second_minibatch_and_on_stale_data_but_not_on_one_fresh_update(m):
    def after(tau: float, drift: float, minibatches: int) -> dict[str, Tensor]:
        config = {**ONE, "k25": K25(tau=tau), "minibatches": minibatches}
        learner = Learner(copy.deepcopy(m), RLConfig(**config))
        learner.step(pack(scored(m, drift=drift)))
        return weights(learner)

    def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return all(torch.allclose(a[n], b[n], rtol=0, atol=2e-4) for n in a)

    fresh = pack(scored(m))  # gradients: an optimiser would blow up the last bits by which sampler and learner differ
    assert_same(gradient(m, fresh, k25=K25(tau=0.0))[0], gradient(m, fresh, k25=K25(tau=0.5))[0], rtol=1e-3)
    assert not same(after(0.0, 0.0, 2), after(0.5, 0.0, 2))
    assert not same(after(0.0, 0.5, 1), after(0.5, 0.5, 1))


def test_minibatches_partition_the_rows_and_their_order_comes_from_the_version(m, monkeypatch):
    seen: list[list[int]] = []
    monkeypatch.setattr(Learner, "_minibatch", lambda self, batch, rows, stats, proximal: seen.append(rows))
    learner = Learner(m, RLConfig(minibatches=3))
    batch = pack(scored(m))
    learner.step(batch)
    learner.step(batch)
    first, second = seen[:3], seen[3:]
    for split in (first, second):
        assert sorted(r for rows in split for r in rows) == list(range(8))
    assert first != second
    seen.clear()
    learner.version = 0
    learner.step(batch)
    assert seen == first
    seen.clear()
    learner.step(pack(scored(m, 2)))
    assert sorted(map(len, seen)) == [1, 1]  # never more minibatches than rows


def test_the_learning_rate_warms_up_and_decays(m):
    learner = Learner(copy.deepcopy(m), RLConfig(lr=1.0, warmup=4, decay_to=0.2, steps=10))
    rates = []
    for learner.version in (0, 1, 3, 4, 5, 10):
        rates.append(learner._lr())
    linear = [1 - 0.8 * v / 10 for v in (0, 1, 3, 4, 5, 10)]
    assert rates == pytest.approx([0.25 * linear[0], 0.5 * linear[1], linear[2], linear[3], linear[4], 0.2])


def test_a_better_than_average_answer_becomes_likelier_and_a_worse_one_less_likely(m):
    good, bad = (made.written_by(m, made.trajectory(0, i, [("prompt", 3), ("policy", 6)])) for i in range(2))
    learner = Learner(copy.deepcopy(m), RLConfig(**{**ONE, "lr": 2e-3}))
    learner.step(pack([Scored.uniform(good, 1.0), Scored.uniform(bad, -1.0)]))
    for t, up in ((good, True), (bad, False)):
        now = made.written_by(learner.model, copy.deepcopy(t))
        assert (sum(now.segments[1].logprobs) > sum(t.segments[1].logprobs)) == up
