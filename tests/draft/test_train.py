"""Training a draft: what it learns, what it is told, and that it goes on exactly where it was killed."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import tiny
import torch
from tiny_draft import FORMS, batch_of, made
from torch import Tensor

from nonet.draft.batch import FeatureBatch
from nonet.draft.config import mtp_config
from nonet.draft.loss import Acceptance, Objective, Teacher, told, weight_of
from nonet.draft.model import Draft, started
from nonet.draft.train import TrainConfig, Training, measure
from nonet.draft.unroll import unrolled
from nonet.ops.overlap import overlap_definition
from nonet.quant import QuantConfig
from nonet.run import Run
from nonet.types import UserError


def answer(draft: Draft, begin: int, end: int, length: int = 24, seed: int = 0, rows: int = 1) -> FeatureBatch:
    """Rows whose answer is tokens begin..end-1."""
    ids = tiny.tokens(rows, length, seed=seed)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, begin:end] = True
    return batch_of(draft, ids, mask)


def training(draft: Draft, tmp_path: Path, batches=None, **over) -> Training:
    config = TrainConfig(**{"steps": 6, "unroll": 3, "eval_every": 3, "log_every": 1, "lr": 3e-3, **over})
    given = batches or (lambda step: [answer(draft, 4, 20, seed=step)])
    return Training(draft, given, [answer(draft, 4, 20, seed=99)], config, Run(tmp_path))


# ------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_shifted_with_the_inputs(form: str):
    """drafts 3.4, 31: the row before the answer is trained, nothing behind it is."""
    draft, begin, end, steps = made(form, torch.float64), 9, 17, 3
    batch, outs, step_of = answer(draft, begin, end), [], draft.step

    def watched(*args, **more) -> Tensor:
        outs.append(step_of(*args, **more))
        outs[-1].retain_grad()
        return outs[-1]

    draft.step = watched
    found = told(draft, Teacher(draft.target, None), batch, steps, Objective(kind="kl"))
    found.loss.backward()
    for step, out in enumerate(outs, 1):
        moved = out.grad[0].abs().sum(-1) > 0
        assert moved[begin - 1]  # reads the answer's first token, as the first draft of a request does
        assert not moved[end - step :].any()  # would predict token `end` or later
        predicts = ~found.alpha_BTK[0, : len(moved), step - 1].isnan()
        assert predicts.nonzero()[:, 0].tolist() == list(range(max(0, begin - step - 1), end - step - 1))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_rows_of_all_steps_get_the_distributions_of_their_own_positions(temperature: float):
    """Against the definition, step by step, with the target's logits written out. Weights are powers of two: they are
    float32 on the way, and nothing else here is.
    """
    d2t = torch.tensor([9, 60, 0, 31, 32, 33, 7, 44])
    draft = made("eagle3", torch.float64, d2t_W=d2t, draft_vocab=8)
    batch, objective = answer(draft, 5, 19, rows=2), Objective(kind="overlap", step_weights=0.5)
    found = told(draft, Teacher(draft.target, d2t, temperature), batch, 4, objective)
    heats = (temperature, temperature)
    with torch.no_grad():
        target_BTW = draft.target.logits(batch.hidden_BTD)
        total = weight = 0.0
        for step, out in enumerate(unrolled(draft, batch, 4), 1):
            rows, times = batch.predicted(step).nonzero(as_tuple=True)
            logits = draft.logits(out[rows, times])
            want = overlap_definition(logits, target_BTW[rows, times + step], d2t, temperatures=heats)
            torch.testing.assert_close(found.alpha_BTK[rows, times, step - 1].double(), want.alpha_T, atol=1e-6, rtol=0)
            total += 0.5 ** (step - 1) * float(want.rows_T.sum())
            weight += 0.5 ** (step - 1) * len(rows)
    assert found.loss is not None
    assert abs(float(found.loss.detach()) - total / weight) < 1e-9
    assert weight_of(batch, 4, objective) == pytest.approx(weight)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_known_logsumexp_changes_nothing(temperature: float):
    d2t = torch.tensor([9, 60, 0, 31])
    draft = made("eagle3", torch.float64, d2t_W=d2t, draft_vocab=4)
    batch, teacher = answer(draft, 5, 19), Teacher(draft.target, d2t, temperature)
    known = FeatureBatch(
        batch.tokens_BT, batch.features_BTF, batch.hidden_BTD, batch.mask_BT,
        lse_BT=(draft.target.logits(batch.hidden_BTD) / temperature).logsumexp(-1).detach(),
    )  # fmt: skip
    one, two = (told(draft, teacher, b, 3, Objective()) for b in (batch, known))
    assert float((one.loss - two.loss).abs()) < 1e-12


def test_acceptance_is_of_joint_prefixes_not_of_marginals():
    """Two depths, each right half of the time, never together: 0.5 tokens are accepted, not 0.75."""
    found = Acceptance(2)
    found.add(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
    assert found.length == pytest.approx(1.5)  # with the bonus token
    assert found.positions == [0.5, 0.0]
    found.add(torch.tensor([[[0.5, torch.nan]]]))  # an answer's last row reaches position 1 only
    assert found.positions == [0.5, 0.0]
    assert found.chains == 3


# ------------------------------------------------------------------------------- what is learnt


@pytest.mark.parametrize("form", ["mtp", "eagle3"])
def test_one_sample_learnt_by_heart_is_accepted_to_the_last_token(form: str, tmp_path: Path):
    """drafts 3.2, 13: within 2% of unroll + 1."""
    draft = made(form)
    with torch.no_grad():  # a target that is nearly sure: else no draft of its own size can match its distributions
        draft.target.lm_head.weight.mul_(6)
    batch = answer(draft, 1, 24)
    c = TrainConfig(steps=400, unroll=4, lr=5e-3, eval_every=100, loss="overlap", save_every_s=1e9)
    found = Training(draft, lambda step: [batch], [batch], c, Run(tmp_path)).fit()
    assert found.length > 0.98 * 5
    events = list(Run(tmp_path).events("draft_acceptance"))
    assert events[0]["step"] == 0
    assert events[0]["length"] < 3
    assert draft.config.trained_steps == max(events, key=lambda e: e["score"])["step"]


def test_frozen_fusion_and_frozen_head_stand_still(tmp_path: Path):
    draft = made("eagle3")
    before = {name: p.clone() for name, p in draft.named_parameters()}
    training(draft, tmp_path, train_fusion=False, train_head=False).fit()
    still = {name for name, p in draft.named_parameters() if torch.equal(p, before[name])}
    assert still == {"fc.weight", "lm_head.weight"}


@pytest.mark.parametrize("form", ["mtp of K3", "eagle3"])
def test_the_target_and_the_routers_biases_stand_still(form: str, tmp_path: Path):
    draft = made(form)
    before = {name: p.clone() for name, p in draft.target.named_parameters()}
    bias = {n: p.clone() for n, p in draft.named_parameters() if n.endswith("e_score_correction_bias")}
    training(draft, tmp_path).fit()
    assert all(torch.equal(p, before[name]) for name, p in draft.target.named_parameters())
    assert all(p.grad is None for p in draft.target.parameters())
    assert all(torch.equal(dict(draft.named_parameters())[n], b) for n, b in bias.items())


def test_experts_are_trained_on_the_grid_they_are_served_on(tmp_path: Path):
    shape = dict(mtp_layers=1, moe=dict(experts=4, top_k=2, d_ff=32, latent=32))
    target = tiny.model("k3", **shape)
    plain, quantised = (started(mtp_config(target.config, quant=q), target) for q in (None, QuantConfig()))
    batch = batch_of(plain, tiny.tokens(1, 24))
    with torch.no_grad():
        assert not torch.equal(next(unrolled(plain, batch, 1)), next(unrolled(quantised, batch, 1)))
    w1 = quantised.mtp.block.mlp.experts.w1.clone()
    training(quantised, tmp_path, lr=1e-3).fit()
    assert not torch.equal(w1, quantised.mtp.block.mlp.experts.w1)


def test_micro_batches_add_up_to_the_whole(tmp_path: Path):
    grads = []
    for cut in (1, 2):
        draft = made("eagle3", torch.float64)
        whole = answer(draft, 4, 20, rows=2)
        rows = [
            FeatureBatch(*(x[i : i + 2 // cut] for x in (whole.tokens_BT, whole.features_BTF, whole.hidden_BTD)), mask)
            for i, mask in zip(range(0, 2, 2 // cut), whole.mask_BT.split(2 // cut), strict=True)
        ]
        job = training(draft, tmp_path / str(cut), batches=lambda step, rows=rows: rows, steps=2)
        job.fit()
        grads.append(torch.cat([p.detach().flatten() for p in draft.parameters()]))
    torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-9)


# ------------------------------------------------------------------------------- runs


class Killed(Exception):
    pass


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon"}, {"single": 3}])
@pytest.mark.parametrize("when", [0, 2, 4, 5])
def test_a_killed_run_ends_with_the_uninterrupted_ones_weights(when: int, more: dict, tmp_path: Path):
    whole = made("eagle3", d2t_W=torch.arange(0, 40, 2), draft_vocab=20)
    training(whole, tmp_path / "whole", **more).fit()

    first = made("eagle3", d2t_W=torch.arange(0, 40, 2), draft_vocab=20)
    calls = iter(range(100))

    def dying(step: int) -> list[FeatureBatch]:
        if next(calls) >= 6 and step == when:  # the first six are the look at the data
            raise Killed
        return [answer(first, 4, 20, seed=step)]

    with pytest.raises(Killed):
        training(first, tmp_path / "killed", batches=dying, save_every_s=0, **more).fit()
    second = made("eagle3", d2t_W=torch.arange(0, 40, 2), draft_vocab=20)
    training(second, tmp_path / "killed", **more).fit()
    for (name, a), (_, b) in zip(whole.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    runs = [list(Run(tmp_path / name).events("draft_step")) for name in ("whole", "killed")]
    assert [e["loss"] for e in runs[0]] == [e["loss"] for e in runs[1]]
    measured = [list(Run(tmp_path / name).events("draft_acceptance")) for name in ("whole", "killed")]
    assert [(e["step"], e["length"]) for e in measured[0]] == [(e["step"], e["length"]) for e in measured[1]]


def test_measuring_between_steps_changes_no_step(tmp_path: Path):
    """drafts 3.4, 37: eval, then train parity."""
    finals = []
    for every in (1, 6):
        draft = made("mtp of K3")
        job = training(draft, tmp_path / str(every), eval_every=every)
        job.score = lambda _, n=iter(range(100)): next(n)  # the last is best, so that the last is kept
        job.fit()
        finals.append(draft.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_the_draft_that_scored_best_is_kept_not_the_last(tmp_path: Path):
    draft, scores = made("eagle3"), iter([0.0, 5.0, 1.0])
    job = training(draft, tmp_path)
    states = []

    def score(d: Draft) -> float:
        states.append({name: t.clone() for name, t in d.state_dict().items()})
        return next(scores)

    job.score = score
    job.fit()
    assert all(torch.equal(t, states[1][name]) for name, t in draft.state_dict().items())
    assert draft.config.trained_steps == 3


def test_another_vocabulary_does_not_continue_a_run(tmp_path: Path):
    """drafts 3.5, 38."""
    training(made("eagle3", d2t_W=torch.arange(20), draft_vocab=20), tmp_path).fit()
    with pytest.raises(UserError, match="d2t: the checkpoint's vocabulary"):
        training(made("eagle3", d2t_W=torch.arange(1, 21), draft_vocab=20), tmp_path).fit()


# ------------------------------------------------------------------------------- what is refused


def test_a_mask_of_nothing_is_refused(tmp_path: Path):
    draft = made("eagle3")
    with pytest.raises(UserError, match="mask: marks no token"):
        training(draft, tmp_path, batches=lambda step: [answer(draft, 0, 0)]).fit()


def test_most_rows_skipped_is_said(tmp_path: Path):
    draft = made("eagle3")
    batches = lambda step: [answer(draft, 4, 20) if step == 0 else answer(draft, 0, 0)]  # noqa: E731
    with pytest.warns(UserWarning, match="5 of 6 rows mark no token"):
        training(draft, tmp_path, batches=batches).fit()


def test_rows_shorter_than_the_unroll_are_refused(tmp_path: Path):
    draft = made("eagle3")
    with pytest.raises(UserError, match="unroll = 3: needs rows of 5"):
        training(draft, tmp_path, batches=lambda step: [answer(draft, 1, 4, length=4)]).fit()


def test_rows_beyond_the_layers_positions_are_refused(tmp_path: Path):
    """drafts 3.2, 9."""
    draft = made("eagle3", layer=dict(max_position=16))
    with pytest.raises(UserError, match="max_position 16"):
        training(draft, tmp_path).fit()


def test_features_of_other_taps_are_refused(tmp_path: Path):
    draft, other = made("eagle3"), made("eagle3", taps=(1, 2))
    with pytest.raises(UserError, match="features: shape"):
        training(draft, tmp_path, batches=lambda step: [answer(other, 4, 20)]).fit()


def test_no_held_out_rows_are_refused(tmp_path: Path):
    draft = made("eagle3")
    job = training(draft, tmp_path)
    job.heldout = []
    with pytest.raises(UserError, match="held-out rows: none"):
        job.fit()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path):
    draft = made("eagle3")
    job = training(draft, tmp_path)
    with torch.no_grad():
        draft.layer.mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"the loss is nan at step 1"):
        job.fit()


def test_sound_data_warns_of_nothing(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(made("eagle3"), tmp_path).fit()


def test_bfloat16_products_are_near_float32(tmp_path: Path):
    draft = made("eagle3")
    batch, teacher = answer(draft, 4, 20), Teacher(draft.target, None)
    c = TrainConfig(unroll=3, precision="bf16")
    one, two = (told(draft, teacher, batch, 3, Objective(), bf16) for bf16 in (False, True))
    assert float((one.loss - two.loss).abs()) < 0.05 * float(one.loss)
    assert measure(draft, teacher, [batch], c).length > 1


def test_one_schedule_goes_over_both_phases():
    c = TrainConfig(steps=30, single=20, warmup=0.1, unroll=5)
    assert [c.at(step).unroll for step in (0, 19, 20, 29)] == [1, 1, 5, 5]
    rates = [c.rate(i) for i in range(30)]
    assert rates == [TrainConfig(steps=30, warmup=0.1).rate(i) for i in range(30)]
    assert rates[3:] == sorted(rates[3:], reverse=True)  # up while it warms up, and never again
    with pytest.raises(ValueError, match="single = 30: must be less than steps = 30"):
        TrainConfig(steps=30, single=30)
