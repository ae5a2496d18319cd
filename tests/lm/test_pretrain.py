"""Pretraining end to end at toy size: it learns, it accumulates exactly, and killed anywhere it is the same run."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import corpora
import numpy as np
import pretrain_job
import pytest
import tiny
import torch
from torch.nn import functional as F

from nonet.lm.held_out import HeldOut
from nonet.lm.packed import predictions
from nonet.lm.pretrain import PretrainConfig, Pretraining, StageConfig, stages, total_tokens, train_step
from nonet.lm.vocabulary import bytes_of_tokens
from nonet.model import Model, hf
from nonet.model.optimizer import Optimizer, head_counts
from nonet.pipeline.pretraining import run_pretrain
from nonet.run import Run
from nonet.types import UserError

SHORT = PretrainConfig(
    stages=(StageConfig(context=32, steps=20),), batch_tokens=256, micro_tokens=128, log_every=1, eval_every=8,
    eval_tokens=600, save_every_s=99.0,
)  # fmt: skip


def made(kind: str = "hybrid", **over) -> Model:
    return tiny.model(kind, vocab=corpora.tokenizer().vocab_size, **{"init_std": 0.05, **over})


def job(m: Model, out: Path, config: PretrainConfig = SHORT, **over) -> Pretraining:
    c = corpora.corpus()
    training, held = c.divided(0.2)
    held_out = HeldOut(c, held, torch.tensor(bytes_of_tokens(corpora.tokenizer())))
    return Pretraining(m, c, training, held_out, config, Run(out), **{"seed": 0, **over})


# --------------------------------------------------------------------------------- one step


def gradient(m: Model, config: PretrainConfig, monkeypatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    kept: dict[str, torch.Tensor] = {}

    def keep(self, lr, clip):
        kept.update({n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None})
        return 0.0

    monkeypatch.setattr(Optimizer, "step", keep)
    c = corpora.corpus()
    pieces = [(int(a), int(a + n)) for a, n in zip(c.starts_M[:12], c.lengths_M[:12], strict=True)]
    optimizer = Optimizer(m.named_parameters(), "muon", 1e-3, (0.9, 0.95), 0.1, head_counts(m))
    return kept, train_step(m, optimizer, c.tokens_N, pieces, 1e-3, config)


def test_micro_batches_add_up_to_the_mean_over_all_tokens(monkeypatch):
    """Against one document at a time, both losses written out."""
    m = made(mtp_layers=1, dtype=torch.float64)
    by_hand = copy.deepcopy(m)
    for budget in (16, 90, 10**6):
        config = SHORT.model_copy(update={"micro_tokens": budget, "mtp_weight": 0.3})
        found, figures = gradient(copy.deepcopy(m), config, monkeypatch)
        by_hand.zero_grad()
        c = corpora.corpus()
        pieces = [(int(a), int(a + n)) for a, n in zip(c.starts_M[:12], c.lengths_M[:12], strict=True)]
        count, ahead = predictions(pieces, 1), predictions(pieces, 2)
        total = torch.zeros((), dtype=torch.float64)
        for a, b in pieces:
            row = torch.from_numpy(c.tokens_N[a:b].astype(np.int64)).unsqueeze(0)
            hidden = by_hand(row)
            total = total + F.cross_entropy(by_hand.logits(hidden)[0, :-1], row[0, 1:], reduction="sum") / count
            further = by_hand.mtp_logits(row, hidden)[0, :-1]
            total = total + 0.3 * F.cross_entropy(further, row[0, 2:], reduction="sum") / ahead
        total.backward()
        assert figures["loss"] + 0.3 * figures["mtp_loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        for name, p in by_hand.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)


def test_without_an_mtp_layer_or_weight_there_is_one_loss(monkeypatch):
    assert gradient(made(), SHORT, monkeypatch)[1]["mtp_loss"] == 0
    off = SHORT.model_copy(update={"mtp_weight": 0.0})
    found, figures = gradient(made(mtp_layers=1), off, monkeypatch)
    assert figures["mtp_loss"] == 0 and not any(n.startswith("mtp.") for n in found)


def test_bf16_products_stay_near_fp32(monkeypatch):
    m = made("gqa")
    exact = gradient(copy.deepcopy(m), SHORT, monkeypatch)[1]["loss"]
    rough = gradient(copy.deepcopy(m), SHORT.model_copy(update={"precision": "bf16"}), monkeypatch)[1]["loss"]
    assert rough != exact and rough == pytest.approx(exact, rel=0.02)


# --------------------------------------------------------------------------------- the run


def test_it_learns_and_says_how_much(tmp_path):
    job(made(mtp_layers=1), tmp_path).fit()
    found = list(Run(tmp_path).events("bpb"))
    assert [(e["when"], e["step"]) for e in found] == [("before", 0), ("during", 8), ("during", 16), ("after", 20)]
    assert found[-1]["bpb"] < 0.93 * found[0]["bpb"]
    steps = list(Run(tmp_path).events("lm_step"))
    assert [e["step"] for e in steps] == list(range(1, 21))
    assert steps[-1]["mtp_loss"] > 0 and "maxvio" not in steps[-1]
    assert max(e["lr"] for e in steps) == SHORT.lr


def test_routers_are_balanced_each_step_and_maxvio_is_logged(tmp_path):
    m = made("k3")
    start = [e.gate.e_score_correction_bias.clone() for e in m.experts()]
    job(m, tmp_path).fit()
    steps = list(Run(tmp_path).events("lm_step"))
    assert all(e["maxvio"] >= 0 for e in steps)
    assert steps[-1]["maxvio"] < steps[0]["maxvio"]
    for gate, before in zip((e.gate for e in m.experts()), start, strict=True):
        assert not torch.equal(gate.e_score_correction_bias, before) and gate.observed is None


def test_a_stage_of_longer_rows_continues_with_the_same_weights_and_its_own_rate(tmp_path):
    ended: list[str] = []
    two = (StageConfig(context=16, steps=4), StageConfig(context=64, steps=3, lr=1e-3, batch_tokens=128))
    config = SHORT.model_copy(update={"stages": two})
    job(made(), tmp_path, config, ended=ended.append).fit()
    assert ended == ["1-context-16", "2-context-64"]
    steps = list(Run(tmp_path).events("lm_step"))
    assert [(e["step"], e["stage"], e["tokens"]) for e in steps if e["step"] in (4, 5)] == [
        (4, "1-context-16", 256),
        (5, "2-context-64", 128),
    ]
    assert [max(e["lr"] for e in steps if e["stage"] == s) for s in ended] == [SHORT.lr, 1e-3]
    ends = [(e["context"], e["when"]) for e in Run(tmp_path).events("bpb")]
    assert ends == [(16, "before"), (16, "after"), (64, "before"), (64, "after")]
    assert total_tokens(config) == 4 * 256 + 3 * 128


def test_later_stages_want_long_documents_unless_told_otherwise():
    c = SHORT.model_copy(update={"stages": (StageConfig(context=16, steps=4), StageConfig(context=64, steps=3))})
    assert [s.min_document for s in stages(c)] == [0, 64]
    packed = StageConfig(context=64, steps=3, min_document=0)
    assert stages(c.model_copy(update={"stages": (c.stages[0], packed)}))[1].min_document == 0


def test_a_loss_that_is_not_a_number_ends_the_run_with_a_sentence(tmp_path):
    m = made()
    with torch.no_grad():
        m.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(UserError, match=r"the loss is nan at step 1; start over with a lower lr"):
        job(m, tmp_path).fit()


# --------------------------------------------------------------------------------- killed


class Interrupted(BaseException):
    pass


def curve(out: Path) -> list[tuple]:
    run = Run(out)
    steps = [(e["step"], e["loss"], e["mtp_loss"], e["grad_norm"], e["lr"]) for e in run.events("lm_step")]
    return [*steps, *((e["step"], e["when"], e["bpb"]) for e in run.events("bpb"))]


@pytest.mark.parametrize(("optimizer", "stop"), [("muon", 1), ("muon", 9), ("adamw", 4)])
def test_interrupted_anywhere_it_ends_as_the_uninterrupted_run(tmp_path, monkeypatch, optimizer, stop):
    two = (StageConfig(context=16, steps=5), StageConfig(context=64, steps=5))
    config = SHORT.model_copy(update={"stages": two, "optimizer": optimizer, "eval_every": 3, "save_every_s": 0.0})
    whole = made("k3", mtp_layers=1)
    job(whole, tmp_path / "whole", config).fit()

    count = iter(range(100))
    real = train_step

    def interrupted(*args):
        if next(count) == stop:
            raise Interrupted
        return real(*args)

    monkeypatch.setattr("nonet.lm.pretrain.train_step", interrupted)
    with pytest.raises(Interrupted):
        job(made("k3", mtp_layers=1), tmp_path / "cut", config).fit()
    monkeypatch.setattr("nonet.lm.pretrain.train_step", real)
    resumed = made("k3", mtp_layers=1, seed=9)  # everything that matters must come from the checkpoint
    job(resumed, tmp_path / "cut", config).fit()
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert all(torch.equal(p, whole.state_dict()[n]) for n, p in resumed.state_dict().items())


def start(out: Path, data: Path) -> subprocess.Popen:
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder.parents[1]), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "pretrain_job.py"), str(out), str(data)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def logged(out: Path) -> int:
    file = out / "events.jsonl"
    return file.read_bytes().count(b'"lm_step"') if file.exists() else 0


def test_kill_minus_nine_leaves_no_trace_in_the_loss_curve(tmp_path):
    """A process killed in the first stage and again in the second, then finished: bitwise the uninterrupted run."""
    data = corpora.write(tmp_path / "texts", corpora.texts(120))
    run_pretrain(pretrain_job.recipe(data), tmp_path / "whole")
    for moment in (5, 17):
        process = start(tmp_path / "cut", data)
        deadline = time.monotonic() + 90
        while logged(tmp_path / "cut") < moment and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert process.poll() is None, process.stderr.read().decode()[-2000:]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        assert moment - 1 <= logged(tmp_path / "cut") < 20
    run_pretrain(pretrain_job.recipe(data), tmp_path / "cut")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    one, other = (hf.load(tmp_path / n / "models" / "pretrain").state_dict() for n in ("whole", "cut"))
    assert all(torch.equal(one[n], other[n]) for n in one)
