"""Features on disk: what is stored for a row is the row's, kinds keep their precision, mistakes are refused."""

import shutil

import pytest
import tiny
import torch

from nonet.draft import store as stores
from nonet.draft.answers import Answer, Row
from nonet.draft.store import FeatureStore, bytes_of, capture, check_room, trainable
from nonet.draft.windows import Windows
from nonet.model.taps import Taps
from nonet.types import UserError

TAPS = (1, 2, 4)  # the last is the depth of tiny's hybrid


def rows(count: int = 7, seed: int = 0) -> list[Row]:
    out = []
    for i in range(count):
        n = 5 + 4 * ((i * 3) % count)
        out.append(Row(tuple(tiny.tokens(n, seed=seed + i).tolist()), ((2, 4), (n - 1, n))))
    return out


@pytest.fixture(scope="module")
def model():
    return tiny.model("hybrid")


def alone(model, row: Row, taps) -> torch.Tensor:
    seen = Taps(taps)
    with torch.inference_mode():
        model(torch.tensor([row.tokens]), taps=seen)
    return seen.features_BTF[0]


@pytest.mark.parametrize("kind", ["gqa", "hybrid", "k3"])
def test_a_row_captured_in_a_batch_is_the_row_captured_alone(kind, tmp_path):
    """speculators#279: a wrong row of the batch would go unnoticed."""
    model = tiny.model(kind)
    taps = (0, 1, model.config.layers)
    made = capture(model, rows(), tmp_path, taps, "float32", "t", batch=64)
    by_tokens = {r.tokens: r for r in rows()}
    for i in range(len(made)):
        stored = made.row(i)
        row = by_tokens.pop(tuple(stored.tokens_T.tolist()))
        want = alone(model, row, taps)
        torch.testing.assert_close(stored.features_TF, want, atol=2e-5, rtol=0)
        assert torch.equal(stored.hidden_TD, stored.features_TF[:, -model.config.d_model :])
        assert stored.mask_T.nonzero()[:, 0].tolist() == [2, 3, len(row.tokens) - 1]
    assert not by_tokens


def test_the_head_of_the_stored_hidden_state_gives_the_targets_logits(model, tmp_path):
    """TorchSpec#87: `last hidden` was another layer's. Here tap L is not among the features and stored beside them."""
    made = capture(model, rows(3), tmp_path, (1, 2), "float32", "t")
    stored = made.row(1)
    with torch.inference_mode():
        want = model.logits(model(stored.tokens_T.unsqueeze(0)))[0]
        torch.testing.assert_close(model.logits(stored.hidden_TD), want, atol=2e-5, rtol=0)
    assert stored.features_TF.shape[1] == 2 * model.config.d_model


@pytest.mark.parametrize(("kind", "within"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_smaller_kinds_are_within_half_a_step(model, kind, within, tmp_path):
    exact = capture(model, rows(), tmp_path / "a", TAPS, "float32", "t")
    small = capture(model, rows(), tmp_path / "b", TAPS, kind, "t")
    for i in range(len(exact)):
        a, b = exact.row(i).features_TF, small.row(i).features_TF
        largest = a.unflatten(-1, (3, -1)).abs().amax(-1, keepdim=True)
        gap = (a - b).unflatten(-1, (3, -1)).abs()
        assert bool((gap <= within * torch.maximum(a.unflatten(-1, (3, -1)).abs(), largest * 2**-6)).all())


@pytest.mark.parametrize("kind", ["fp8", "bf16", "float32"])
def test_the_size_said_before_is_the_size_written(model, kind, tmp_path):
    made = capture(model, rows(), tmp_path, TAPS, kind, "t")
    tokens = sum(len(r.tokens) for r in rows())
    said = bytes_of(tokens, model.config.d_model, TAPS, model.config.layers, kind)
    header = 1000
    assert said <= made.bytes <= said + 8 * len(made) + header


def test_a_full_disk_is_refused_before_anything_is_computed(model, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match="use kind = fp8"):
        capture(model, rows(), tmp_path / "new" / "store", TAPS, "bf16", "t")
    assert not list((tmp_path / "new" / "store").glob("*.safetensors"))
    check_room(900, tmp_path)


def test_a_stopped_capture_goes_on_and_is_the_uninterrupted_one(model, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_SHARD_BYTES", 6000)
    whole = capture(model, rows(), tmp_path / "a", TAPS, "float32", "t")
    assert len(whole.settings["shards"]) > 2
    made, real = 0, stores._shard

    def dying(*arguments):
        nonlocal made
        made += 1
        if made == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(stores, "_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        capture(model, rows(), tmp_path / "b", TAPS, "float32", "t")
    with pytest.raises(UserError, match="stopped half-way"):
        FeatureStore(tmp_path / "b", "t", TAPS)
    made = 10
    again = capture(model, rows(), tmp_path / "b", TAPS, "float32", "t")
    assert made == 10 + len(whole.settings["shards"]) - 2
    assert all(torch.equal(whole.row(i).features_TF, again.row(i).features_TF) for i in range(len(whole)))


def test_another_target_other_taps_and_other_rows_are_refused(model, tmp_path):
    capture(model, rows(), tmp_path, TAPS, "bf16", "t")
    with pytest.raises(UserError, match="made by the target t, this one is u"):
        FeatureStore(tmp_path, "u", TAPS)
    with pytest.raises(UserError, match=r"holds taps \[1, 2, 4\], wanted are \[1, 3, 4\]"):
        FeatureStore(tmp_path, "t", (1, 3, 4))
    with pytest.raises(UserError, match="content"):
        capture(model, rows(seed=9), tmp_path, TAPS, "bf16", "t")
    with pytest.raises(UserError, match=r"no store\.json"):
        FeatureStore(tmp_path / "nothing", "t", TAPS)


def test_rows_without_the_targets_words_or_too_long_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="no token of these rows was written by the target"):
        capture(model, [Row((1, 2, 3), ())], tmp_path, TAPS, "bf16", "t")
    with pytest.raises(UserError, match="no rows"):
        capture(model, [], tmp_path, TAPS, "bf16", "t")
    long = tiny.model("hybrid", max_position=8)
    with pytest.raises(UserError, match="a row has 9 tokens, the target reads 8"):
        capture(long, [Row(tuple(range(9)), ((3, 9),))], tmp_path, TAPS, "bf16", "t")


def test_looping_and_held_out_answers_are_not_trained():
    row = Row((1, 2), ((1, 2),))
    answers = [Answer(n, "d", held, (row,), 1, 1, stop) for n, held, stop in
               [("a", False, "done"), ("b", True, "done"), ("c", False, "loop"), ("d", False, "length")]]  # fmt: skip
    assert len(trainable(answers, False)) == 2 and len(trainable(answers, True)) == 1


# ---------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_kept_totals_are_of_the_temperature_that_was_asked_for(model, tmp_path, temperature):
    made = capture(model, rows(), tmp_path, TAPS, "float32", "t", temperature=temperature)
    for i in range(len(made)):
        row = made.row(i)
        before = row.mask_T.nonzero()[:, 0] - 1
        want = (model.logits(row.hidden_TD[before]) / temperature).logsumexp(-1)
        torch.testing.assert_close(row.lse_T[before], want, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"temperature: .* -> 7.0"):
        capture(model, rows(), tmp_path, TAPS, "float32", "t", temperature=7.0)


def test_an_epoch_holds_every_window_with_words_once_and_says_what_it_cut(model, tmp_path):
    made = capture(model, rows(), tmp_path, TAPS, "float32", "t")
    windows = Windows.of(made, 8, 20)
    seen = [tuple(b.tokens_BT[0, s:e].tolist()) for b in (windows.batch(i) for i in range(windows.per_epoch))
            for s, e in zip(b.starts, [*b.starts[1:], b.tokens_BT.shape[1]], strict=True)]  # fmt: skip
    cut = [r.tokens[i : i + 8] for r in rows() for i in range(0, len(r.tokens), 8)
           if any(a < i + 8 and b > i for a, b in r.policy)]  # fmt: skip
    assert sorted(seen) == sorted(cut)
    assert any("longer than the window of 8 tokens and were cut" in n for n in windows.notes)
    assert any("hold none of the target's words and were left out" in n for n in windows.notes)
    assert all(windows.batch(i).tokens_BT.shape[1] <= 20 for i in range(windows.per_epoch))
    roomy = Windows.of(made, 64, 64)
    assert any("never filled" in n for n in roomy.notes)


def test_a_batch_is_a_function_of_its_step_and_epochs_differ(model, tmp_path):
    made = capture(model, rows(), tmp_path, TAPS, "float32", "t")
    a, b = Windows.of(made, 32, 64), Windows.of(made, 32, 64)
    n = a.per_epoch
    assert all(torch.equal(a.batch(i).tokens_BT, b.batch(i).tokens_BT) for i in (2 * n, 0, n + 1))
    orders = [
        [a.batch(i).tokens_BT[0].tolist() for i in range(n)],
        [a.batch(n + i).tokens_BT[0].tolist() for i in range(n)],
    ]
    assert orders[0] != orders[1]
    batch = a.batch(0).checked(model.config.d_model, len(TAPS))
    assert batch.starts is not None and batch.counts_B is None


def test_a_window_that_cannot_be_is_refused(model, tmp_path):
    made = capture(model, rows(), tmp_path, TAPS, "float32", "t")
    with pytest.raises(UserError, match="window = 1"):
        Windows.of(made, 1, 64)
    with pytest.raises(UserError, match="batch_tokens = 16"):
        Windows.of(made, 32, 16)


@pytest.mark.parametrize("kind", ["float32", "fp8"])
def test_the_stored_logsumexp_is_that_of_the_stored_hidden_state_before_every_answer(model, kind, tmp_path):
    made = capture(model, rows(), tmp_path, TAPS, kind, "t")
    for i in range(len(made)):
        stored = made.row(i)
        with torch.inference_mode():
            want = model.logits(stored.hidden_TD).logsumexp(-1)
        before = stored.mask_T.nonzero()[:, 0] - 1
        torch.testing.assert_close(stored.lse_T[before], want[before], atol=1e-5, rtol=0)
        assert int((stored.lse_T != 0).sum()) == len(before)


def test_products_in_bfloat16_are_close_and_another_store(model, tmp_path):
    exact = capture(model, rows(), tmp_path / "a", TAPS, "float32", "t")
    fast = capture(model, rows(), tmp_path / "b", TAPS, "float32", "t", bf16=True)
    a, b = (torch.cat([s.row(i).hidden_TD for i in range(len(s))]) for s in (exact, fast))
    assert 0 < float((a - b).norm() / a.norm()) < 0.05  # eight sublayers of noisy weights, 2^-8 a product
    with pytest.raises(UserError, match="bf16: False -> True"):
        capture(model, rows(), tmp_path / "a", TAPS, "float32", "t", bf16=True)
