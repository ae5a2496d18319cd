"""A draft's directory: what comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_draft import FORMS, batch_of, made

from nonet.draft.config import eagle3_config, mtp_config
from nonet.draft.files import load, save, vocabulary_hash
from nonet.draft.model import started
from nonet.draft.unroll import unrolled
from nonet.types import UserError

D2T = torch.tensor([5, 0, 60, 33, 21])


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_saved_comes_back_bit_for_bit(form: str, pruned: bool, tmp_path: Path):
    draft = made(form, d2t_W=D2T, draft_vocab=5) if pruned else made(form)
    save(draft, tmp_path)
    again = load(tmp_path, draft.target)
    assert again.config == draft.config
    for (name, a), (other, b) in zip(draft.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    batch = batch_of(draft, tiny.tokens(1, 9))
    with torch.no_grad():
        assert torch.equal(draft.logits(next(unrolled(draft, batch, 1))), again.logits(next(unrolled(again, batch, 1))))


def test_names_are_those_of_public_checkpoints(tmp_path: Path):
    save(made("eagle3", d2t_W=D2T, draft_vocab=5), tmp_path / "eagle3")
    names = set(load_file(tmp_path / "eagle3" / "model.safetensors"))
    assert {"fc.weight", "layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "d2t"} <= names
    assert {"norm.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight"} <= names
    save(made("mtp of K3"), tmp_path / "mtp")
    names = set(load_file(tmp_path / "mtp" / "model.safetensors"))
    assert {"fc.weight", "model.layers.6.eh_proj.weight", "model.layers.6.shared_head.norm.weight"} <= names
    assert "model.layers.6.block_sparse_moe.experts.5.w2.weight" in names
    assert not any("embed" in name or "lm_head" in name for name in names)


def test_the_map_is_part_of_the_weights_and_never_made_anew(tmp_path: Path):
    """drafts 3.5, 38, 40 and 16: a warm start keeps it, a draft without it is refused."""
    draft = made("eagle3", d2t_W=D2T, draft_vocab=5)
    save(draft, tmp_path)
    assert torch.equal(load(tmp_path, draft.target).d2t_W, D2T)
    edit(tmp_path, lambda t: t.pop("d2t"))
    with pytest.raises(UserError, match="d2t: missing"):
        load(tmp_path, draft.target)


@pytest.mark.parametrize(
    "bad", [torch.arange(5) * 0, torch.tensor([0, 1, 2, 3, 61]), torch.tensor([0, 1, 2, 3, -1]), torch.arange(4)]
)
def test_maps_that_are_not_ids_are_refused(bad: torch.Tensor):
    with pytest.raises(UserError, match="d2t"):
        made("eagle3", d2t_W=bad, draft_vocab=5)


@pytest.mark.parametrize("size", [-1, 0, 62])
def test_vocabulary_sizes_that_cannot_be_are_refused(size: int):
    with pytest.raises(UserError, match="draft_vocab"):
        eagle3_config(tiny.model("gqa").config, taps=(0, 1, 2), draft_vocab=size)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path):
    draft = made("mtp")
    save(draft, tmp_path)
    edit(tmp_path, lambda t: t.pop("fc.weight"))
    with pytest.raises(UserError, match=r"lacks fc\.weight"):
        load(tmp_path, draft.target)
    edit(tmp_path, lambda t: t.update({"fc.weight": torch.zeros(32, 64), "mtp.fc": torch.zeros(1)}))
    with pytest.raises(UserError, match=r"surplus mtp\.fc.*fc\.weight has shape \[32, 64\], needs \[32, 96\]"):
        load(tmp_path, draft.target)


def test_values_that_are_not_finite_are_refused(tmp_path: Path):
    draft = made("eagle3")
    save(draft, tmp_path)
    edit(tmp_path, lambda t: t["norm.weight"].fill_(float("nan")))
    with pytest.raises(UserError, match=r"norm\.weight has 32 non-finite"):
        load(tmp_path, draft.target)


def test_another_target_is_refused(tmp_path: Path):
    draft = made("mtp")
    save(draft, tmp_path)
    with pytest.raises(UserError, match="target: its dimensions"):
        load(tmp_path, tiny.model("hybrid", mtp_layers=1, d_ff=64))


def test_another_vocabulary_is_refused(tmp_path: Path, policy_directory: Path):
    target = tiny.model("hybrid", mtp_layers=1)
    config = mtp_config(target.config, vocabulary_hash(policy_directory))
    save(started(config, target), tmp_path)
    load(tmp_path, target, vocabulary_hash(policy_directory))
    other = tmp_path / "other"
    other.mkdir()
    raw = json.loads((policy_directory / "tokenizer.json").read_text())
    raw["added_tokens"][0]["content"] += "!"
    (other / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="target: its vocabulary"):
        load(tmp_path, target, vocabulary_hash(other))


def test_a_target_without_the_layer_has_no_mtp_form():
    with pytest.raises(UserError, match="no MTP layer"):
        mtp_config(tiny.model("hybrid").config)


def test_taps_that_coincide_on_a_shallow_target_are_moved_apart_and_said():
    """drafts 3.3: duplicate taps on shallow targets."""
    with pytest.warns(UserWarning, match="coincide"):
        assert eagle3_config(tiny.model("gqa").config).taps == (0, 1, 2)
    with pytest.raises(UserError, match="ascend"):
        eagle3_config(tiny.model("gqa").config, taps=(1, 1, 2))
