"""Unrolled steps over whole rows equal chains that are fed through a cache, as generation feeds them."""

from __future__ import annotations

import pytest
import tiny
import torch
from tiny_draft import FORMS, batch_of, made

from nonet.draft.batch import FeatureBatch
from nonet.draft.config import eagle3_config
from nonet.draft.model import can_copy, started
from nonet.draft.unroll import unrolled, unrolled_definition
from nonet.model.taps import Taps
from nonet.types import UserError


@pytest.mark.parametrize("form", FORMS)
def test_training_and_serving_compute_the_same(form: str):
    """In float64: what is trained is what is served, at every row and step."""
    draft = made(form, torch.float64)
    batch = batch_of(draft, tiny.tokens(2, 20))
    with torch.no_grad():
        fast, slow = list(unrolled(draft, batch, 5)), unrolled_definition(draft, batch, 5)
    assert len(fast) == len(slow) == 5
    for step, (a, b) in enumerate(zip(fast, slow, strict=True), 1):
        assert a.shape == b.shape == (2, 20 - step, 32)
        close = 3e-6 if draft.target.config.moe else 1e-10  # routers compute in float32
        torch.testing.assert_close(a, b, atol=close, rtol=close)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_do_not_see_each_other(form: str):
    draft, starts = made(form, torch.float64), [0, 9, 10, 22]
    ids = tiny.tokens(1, 27)
    packed = batch_of(draft, ids, starts=starts)
    with torch.no_grad():
        whole = list(unrolled(draft, packed, 4))
        for a, b in zip(starts, [*starts[1:], 27], strict=True):
            alone = list(unrolled(draft, batch_of(draft, ids[:, a:b]), 4))
            assert len(alone) == min(4, b - a - 1)
            for step, want in enumerate(alone, 1):
                torch.testing.assert_close(whole[step - 1][:, a : b - step], want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing(form: str):
    draft, counts = made(form, torch.float64), torch.tensor([15, 6, 1])
    ids = tiny.tokens(3, 15)
    padded = batch_of(draft, ids, counts_B=counts)
    with torch.no_grad():
        whole = list(unrolled(draft, padded, 3))
        for row, n in enumerate(counts.tolist()):
            for step, want in enumerate(unrolled(draft, batch_of(draft, ids[row : row + 1, :n]), 3), 1):
                torch.testing.assert_close(whole[step - 1][row, : n - step], want[0], atol=1e-6, rtol=1e-6)


def test_later_steps_read_the_true_tokens_and_their_own_states():
    """Changing token t + 3 changes step 3 of row t, and no earlier step of it."""
    draft, ids = made("eagle3", torch.float64), tiny.tokens(1, 12)
    batch = batch_of(draft, ids)
    other = batch.tokens_BT.clone()
    other[0, 8] = (other[0, 8] + 1) % 61
    with torch.no_grad():
        one = list(unrolled(draft, batch, 4))
        two = list(unrolled(draft, FeatureBatch(other, batch.features_BTF, batch.hidden_BTD, batch.mask_BT), 4))
    for step in (1, 2, 3, 4):
        changed = (one[step - 1] != two[step - 1]).any(-1)[0]
        assert changed[8 - step]
        assert not changed[: 8 - step].any()


def test_norm_recycling_is_another_draft():
    """drafts 3.3, 28: both ways exist, agree on step 1 and differ from step 2 on."""
    plain, normed = made("mtp", torch.float64), made("mtp", torch.float64, norm_output=True)
    batch = batch_of(plain, tiny.tokens(1, 10))
    with torch.no_grad():
        one, two = list(unrolled(plain, batch, 2)), list(unrolled(normed, batch, 2))
        slow = unrolled_definition(normed, batch, 2)
    assert torch.equal(one[0], two[0])
    assert float((one[1] - two[1]).abs().max()) > 1e-3
    torch.testing.assert_close(two[1], slow[1], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm"])
def test_each_flag_changes_the_logits(flag: str):
    """drafts 3.3, 26: a flag that a reader drops must not go unnoticed."""
    plain, flagged = made("eagle3", torch.float64), made("eagle3", torch.float64, **{flag: True})
    batch = batch_of(plain, tiny.tokens(1, 10))
    with torch.no_grad():
        one, two = (d.logits(next(unrolled(d, batch, 1))) for d in (plain, flagged))
    assert float((one - two).abs().max()) > 1e-3


def test_a_copied_layer_is_the_targets_last_one():
    """Where nothing else is mixed in, what it makes of the state before that layer is the state after it."""
    target = tiny.model("gqa", dtype=torch.float64, qkv_bias=False, qk_norm=False, o_bias=False)
    last, d = target.config.layers - 1, target.config.d_model
    draft = started(eagle3_config(target.config, taps=(0, last)), target, copied=True)
    with torch.no_grad():
        draft.fc.weight[:, :-d], draft.fc.weight[:, -d:] = 0, torch.eye(d)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(draft.layer.self_attn, name).weight[:, :d] = 0
        ids, taps = tiny.tokens(1, 9), Taps((0, last))
        want = target(ids, taps=taps)
        found = draft.step(draft.embed(ids), draft.fuse(taps.features_BTF), target.span(ids))
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12)


def test_a_layer_of_another_shape_is_not_copied():
    target = tiny.model("gqa")
    with pytest.raises(UserError, match=r"draft\.start = layer: the target's last layer has another shape"):
        started(eagle3_config(target.config, taps=(0, 1), layer={"d_ff": 20}), target, copied=True)
    assert not can_copy(eagle3_config(tiny.model("hybrid").config, taps=(0, 1)), tiny.model("hybrid"))
