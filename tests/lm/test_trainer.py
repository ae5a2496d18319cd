"""Supervised training: what carries loss, what MTP predicts, and a resume that is the uninterrupted run."""

from __future__ import annotations

import copy
import math

import pytest
import tiny
import torch
from torch import Tensor

from nonet.lm import LMConfig, train
from nonet.lm.trainer import Row, losses, pad, schedule
from nonet.model import Model
from nonet.model.attn_res import Stream
from nonet.run import Run

CONFIG = LMConfig(steps=14, batch=2, block=4, warmup=3, lr=1e-2, save_every_s=0)


@pytest.fixture(scope="module")
def m() -> Model:
    return tiny.model(mtp_layers=1)


def row(n: int, seed: int, share: float = 0.6) -> Row:
    draw = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return Row(tiny.tokens(n, seed=seed).tolist(), (draw < share).tolist())


def rows(first: int, count: int) -> list[Row]:
    return [row(5 + (7 * i) % 11, i) for i in range(first, first + count)]


# ------------------------------------------------------------------------------- losses


def test_the_loss_is_the_mean_over_masked_in_tokens_of_the_whole_batch(m):
    """By hand: every masked-in token (the first of a row has no prediction) counts once, padding never."""
    batch = [row(6, 1), row(11, 2), row(3, 3)]
    total, count = 0.0, 0
    for r in batch:
        with torch.no_grad():
            logps = m.logits(m(torch.tensor([r.tokens]))[0]).log_softmax(-1)
        for t in range(1, len(r.tokens)):
            if r.mask[t]:
                total -= float(logps[t - 1, r.tokens[t]])
                count += 1
    assert float(losses(m, batch, False)[0].detach()) == pytest.approx(total / count, rel=1e-5)


def test_the_mtp_loss_predicts_two_ahead_from_the_hidden_state_and_the_next_embedding(m):
    """By hand, position by position: hidden of t and embedding of t+1 give t+2 (DeepSeek-V3 section 2.2)."""
    r = row(9, 4)
    tokens = torch.tensor([r.tokens])
    with torch.no_grad():
        hidden = m(tokens)
        mtp, embed = m.mtp, m.embed_tokens(tokens)
        embed[:, 1] = 0  # the first row reads no embedding
        joined = mtp.eh_proj(torch.cat([mtp.enorm(embed[:, 1:]), mtp.hnorm(hidden[:, :-1])], -1))
        total, count = 0.0, 0
        for t in range(len(r.tokens) - 2):
            stream = Stream(joined[:, : t + 1])
            mtp.block(stream, m.span(tokens[:, 1 : t + 2]), None)
            logps = m.lm_head(mtp.norm(stream.read(None)[0, -1])).log_softmax(-1)
            if r.mask[t + 2]:
                total -= float(logps[r.tokens[t + 2]])
                count += 1
    assert count > 2
    assert float(losses(m, [r], True)[1].detach()) == pytest.approx(total / count, rel=1e-4)


def gradient(m: Model, batch: list[Row]) -> dict[str, Tensor]:
    m = copy.deepcopy(m)
    loss, mtp = losses(m, batch, True)
    (loss + mtp).backward()
    return {n: p.grad for n, p in m.named_parameters()}


def test_masked_tokens_carry_no_loss(m):
    """A masked-out token at the end of a row is nobody's context: changing it changes nothing at all."""
    r = row(8, 5)
    tokens, mask = [*r.tokens], [*r.mask[:-1], False]
    before, loss = gradient(m, [Row(tokens, mask)]), losses(m, [Row(tokens, mask)], True)
    tokens = [*tokens[:-1], (tokens[-1] + 1) % 61]
    after, same = gradient(m, [Row(tokens, mask)]), losses(m, [Row(tokens, mask)], True)
    assert [float(x.detach()) for x in loss] == [float(x.detach()) for x in same]
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-7)
    moved = losses(m, [Row(tokens, [*mask[:-1], True])], True)
    assert float(moved[0].detach()) != float(loss[0].detach())


def test_a_batch_with_nothing_to_learn_has_no_loss_and_no_gradient(m):
    """A mean over nothing is NaN, and one NaN step ends a training run."""
    found = copy.deepcopy(m)
    loss, mtp = losses(found, [Row([1, 2, 3, 4], [True, False, False, False])], True)
    loss.backward()
    assert (float(loss.detach()), mtp) == (0, None)
    assert all(p.grad is None or not p.grad.any() for p in found.parameters())


def test_padding_is_invisible(m):
    batch = [row(4, 6, share=0.9), row(12, 7)]
    alone = [losses(m, [r], True) for r in batch]
    counts = [[sum(r.mask[k:]) for r in batch] for k in (1, 2)]
    for k, together in enumerate(losses(m, batch, True)):
        weighted = sum(float(a[k].detach()) * n for a, n in zip(alone, counts[k], strict=True)) / sum(counts[k])
        assert float(together.detach()) == pytest.approx(weighted, rel=1e-5)
    tokens, mask = pad(batch)
    assert tokens.shape == mask.shape == (2, 12)
    assert not mask[0, 4:].any()


def test_a_model_without_mtp_and_rows_too_short_for_it_have_one_loss(m):
    assert losses(m, [row(2, 8, share=2)], True)[1] is None
    assert losses(tiny.model(), [row(9, 9)], False)[1] is None
    with pytest.raises(ValueError, match="no MTP layer"):
        losses(tiny.model(), [row(9, 9)], True)


# --------------------------------------------------------------------------- the run of it


def fit(m: Model, out, rows=rows, config: LMConfig = CONFIG) -> Model:
    m = copy.deepcopy(m)
    train(m, rows, config, Run(out), "cold")
    return m


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize(("optimizer", "stop"), [("muon", 1), ("muon", 12), ("adamw", 7)])
def test_a_run_interrupted_anywhere_ends_as_the_uninterrupted_one(m, tmp_path, monkeypatch, optimizer, stop):
    config = CONFIG.model_copy(update={"optimizer": optimizer})
    whole = fit(m, tmp_path / "whole", config=config)

    count = iter(range(1000))
    real = losses

    def interrupted(*args):
        if next(count) == stop:
            raise Interrupted
        return real(*args)

    monkeypatch.setattr("nonet.lm.trainer.losses", interrupted)
    with pytest.raises(Interrupted):
        fit(m, tmp_path / "cut", config=config)
    monkeypatch.setattr("nonet.lm.trainer.losses", real)
    # another initialisation: everything that matters must come from the checkpoint
    resumed = fit(tiny.model(mtp_layers=1, seed=9), tmp_path / "cut", config=config)
    assert all(torch.equal(p, whole.state_dict()[n]) for n, p in resumed.state_dict().items())

    def logged(name: str) -> list[tuple]:
        return [(e["step"], e["loss"], e["mtp_loss"], e["lr"]) for e in Run(tmp_path / name).events("lm_step")]

    assert logged("cut") == logged("whole")
    assert [s for s, *_ in logged("cut")] == [10, 14]


def test_every_row_is_seen_once_and_batches_are_a_function_of_the_step(m, tmp_path):
    asked: list[tuple[int, int]] = []

    def watched(first: int, count: int) -> list[Row]:
        asked.append((first, count))
        return rows(first, count)

    fit(m, tmp_path, rows=watched)
    assert asked == [(8 * block, 8) for block in range(4)]


def test_training_learns(m, tmp_path):
    fixed = rows(0, 2)
    config = CONFIG.model_copy(update={"steps": 25, "block": 1})
    learnt = fit(m, tmp_path, rows=lambda first, count: fixed, config=config)
    before, after = (float(losses(x, fixed, False)[0].detach()) for x in (m, learnt))
    assert after < 0.5 * before
    assert not learnt.training


def test_padding_reaches_no_router():
    m = tiny.model("k3")
    m.train()
    batch = [row(4, 6, share=2), row(12, 7, share=2)]
    losses(m, batch, False)
    assert [e.gate.observed.tokens for e in m.experts()] == [16] * (m.config.layers - 1)


def test_routers_are_balanced_after_every_step(tmp_path):
    learnt = fit(tiny.model("k3"), tmp_path, config=CONFIG.model_copy(update={"steps": 2}))
    before = [e.gate.e_score_correction_bias for e in tiny.model("k3").experts()]
    for gate, start in zip((e.gate for e in learnt.experts()), before, strict=True):
        assert gate.observed is None and not torch.equal(gate.e_score_correction_bias, start)


def test_the_cosine_falls_to_the_same_end():
    c = LMConfig(steps=100, warmup=10, decay_to=0.1, decay="cosine")
    assert [schedule(s, c) for s in (4, 10, 55, 100)] == pytest.approx([0.5, 1.0, 0.55, 0.1])
    assert schedule(30, c) > schedule(30, CONFIG.model_copy(update={"steps": 100, "warmup": 10, "decay_to": 0.1}))


def test_the_schedule_rises_and_falls_in_straight_lines():
    c = LMConfig(steps=100, warmup=10, decay_to=0.1)
    assert [schedule(s, c) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert schedule(10, c) == pytest.approx(1.0)
    assert schedule(55, c) == pytest.approx(0.55)
    assert schedule(100, c) == pytest.approx(0.1)
    assert schedule(0, LMConfig(steps=10, warmup=0)) == pytest.approx(1.0)
    assert math.isfinite(schedule(5, LMConfig(steps=5, warmup=5)))
