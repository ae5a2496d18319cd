"""Packed experts between disk and model: codes and scales bit for bit, whoever chose them, and what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_k3
import torch
from hf_edit import edit_config, edit_weights, packed_model, same, tensors
from k3_oracle import Oracle
from safetensors.torch import save_file
from torch import Tensor

from nonet.model import hf
from nonet.quant import QuantConfig, decode, encode, pack


@torch.no_grad()
@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_trained_master_is_written_as_the_codes_it_was_trained_with(rule: Any, dtype: Any, tmp_path: Path):
    model = packed_model(quant=QuantConfig(rule=rule))
    hf.save(model, tmp_path, dtype)
    found, back = tensors(tmp_path), hf.load(tmp_path)
    for layer in (1, 5):
        for part in ("w1", "w2", "w3"):
            master = getattr(model.layers[layer].mlp.experts, part)
            for e in range(6):
                name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{e}.{part}.weight"
                mx = pack.unpack(found[f"{name}_packed"], found[f"{name}_scale"])
                want = encode(master[e], "mxfp4", rule)
                assert torch.equal(mx.codes, want.codes) and torch.equal(mx.scales, want.scales)
            seen = model.config.quant.apply(master, "routed_expert_weights", part)
            assert torch.equal(getattr(back.layers[layer].mlp.experts, part), seen)
    if dtype is None:
        tokens = tiny.tokens(2, 9)
        assert torch.equal(model(tokens), back.eval()(tokens))


@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saving_what_was_loaded_moves_no_bit_of_a_packed_expert(rule: Any, dtype: torch.dtype, tmp_path: Path):
    """Random codes under random scales: most rules would choose other scales for some of these blocks."""
    source, out = tiny_k3.write(tmp_path / "in"), tmp_path / "out"
    zeros = "model.layers.2.block_sparse_moe.experts.3.w1.weight_packed"
    edit_weights(source, lambda w: w[zeros][:4, :16].fill_(0x08))
    edit_config(source, nonet={"quant": {"rule": rule}})
    model = hf.load(source, dtype)
    assert model.config.quant == QuantConfig(routed_expert_inputs="none", rule=rule)
    hf.save(model, out)
    want, got = tensors(source), tensors(out)
    packed = [name for name in want if name.endswith(("_packed", "_scale"))]
    assert len(packed) == 5 * 8 * 3 * 2
    for name in packed:
        assert torch.equal(want[name], got[f"language_model.{name}"]), name
    if dtype == torch.float32:
        same(tensors(out), _saved_again(out, tmp_path / "again"))


def _saved_again(source: Path, out: Path) -> dict[str, Tensor]:
    hf.save(hf.load(source), out)
    return tensors(out)


def test_the_rule_alone_would_have_moved_bits(tmp_path: Path):
    """The test above can fail: some block of that directory is not what encoding its values gives."""
    found = tensors(tiny_k3.write(tmp_path))
    moved = 0
    for name in [n.removesuffix("_packed") for n in found if n.endswith("_packed")]:
        mx = pack.unpack(found[f"{name}_packed"], found[f"{name}_scale"])
        moved += not torch.equal(encode(decode(mx), "mxfp4", "ceil").scales, mx.scales)
    assert moved > 0


def test_an_expert_that_has_been_trained_gets_new_scales(tmp_path: Path):
    source = tiny_k3.write(tmp_path / "in")
    model = hf.load(source)
    w1 = model.layers[1].mlp.experts.w1
    with torch.no_grad():
        w1[2] += torch.randn(w1[2].shape, generator=torch.Generator().manual_seed(0)) * 0.1
    hf.save(model, tmp_path / "out")
    got = tensors(tmp_path / "out")
    name = "language_model.model.layers.1.block_sparse_moe.experts.{}.w1.weight_packed"
    want = pack.pack(encode(w1.detach()[2], "mxfp4", "floor"))[0]
    assert torch.equal(got[name.format(2)], want)
    assert torch.equal(got[name.format(3)], tensors(source)[name.format(3).removeprefix("language_model.")])


@torch.no_grad()
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_log_probs_equal_an_independent_k3(packed: bool, prefix: str, tmp_path: Path):
    # 1e-6: the oracle's latent norms take rms_norm_eps, ours 1e-6 whatever it says
    fields = {"rms_norm_eps": 1e-6, "linear_attn_config__decay_rank": 12}
    source = tiny_k3.write(tmp_path, packed=packed, prefix=prefix, rank=12, **fields)
    model = hf.load(source, torch.float64).eval()
    ids = tiny.tokens(1, 40, vocab=tiny_k3.VOCAB)
    want = Oracle(source).log_probs(ids[0].tolist())
    got = model.logits(model(ids))[0].log_softmax(-1)
    assert float((got - want).abs().max()) < 1e-9


def test_stored_keeps_codes(tmp_path: Path):
    source = tiny_k3.write(tmp_path)
    config = hf.read_config(source)
    given = dict(hf.stored(source, config, torch.bfloat16))
    assert {name: tuple(t.shape) for name, t in given.items()} == hf.expected(config)
    want = tensors(source)
    for name, tensor in given.items():
        if name.endswith(("_packed", "_scale")):
            assert torch.equal(tensor, want[name.removeprefix("language_model.")]), name
        else:
            assert tensor.dtype == torch.bfloat16


def test_halves_of_a_packed_expert_may_lie_in_different_shards(tmp_path: Path):
    source = tiny_k3.write(tmp_path / "in")
    want = hf.load(source)
    weights = tensors(source)
    scales = {name: t for name, t in weights.items() if name.endswith("_scale")}
    rest = {name: t for name, t in weights.items() if name not in scales}
    names = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": rest}
    for file, part in names.items():
        save_file(part, source / file)
    (source / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in names.items() for name in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    got = hf.load(source)
    assert all(torch.equal(a, b) for a, b in zip(want.parameters(), got.parameters(), strict=True))


def test_weights_in_another_format_are_written_plain(tmp_path: Path):
    """MXFP8 weights, and inputs alone, have no packed form: the master is written, and config.json says the rest."""
    for i, choice in enumerate(("mxfp8", "none")):
        model = packed_model(quant=QuantConfig(routed_expert_weights=choice))
        hf.save(model, tmp_path / str(i))
        raw = json.loads((tmp_path / str(i) / "config.json").read_text())
        assert "quantization_config" not in raw["text_config"]
        back = hf.load(tmp_path / str(i))
        assert back.config == model.config
        assert torch.equal(back.layers[1].mlp.experts.w2, model.layers[1].mlp.experts.w2)
