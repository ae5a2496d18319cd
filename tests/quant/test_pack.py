"""The stored layouts: bits by hand, nothing lost, values as ggml reads them; configs written, read and refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from nonet.quant.mx import MX, decode, encode
from nonet.quant.pack import FORMAT, K3_IGNORE, Scheme, config_dict, from_gguf, pack, read_config, to_gguf, unpack
from nonet.types import UserError


def every_code() -> MX:
    """Two rows of two blocks: codes counting up and down, four scales."""
    codes = torch.arange(64, dtype=torch.uint8) % 16
    return MX(torch.stack([codes, 15 - codes]), torch.tensor([[0, 1], [127, 254]], dtype=torch.uint8), "mxfp4")


def test_the_low_nibble_is_the_even_column():
    packed, scale = pack(every_code())
    assert packed.shape == (2, 32)
    assert packed[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert packed[1, :4].tolist() == [0xEF, 0xCD, 0xAB, 0x89]
    assert scale.tolist() == [[0, 1], [127, 254]]


def test_gguf_blocks_are_a_scale_and_two_halves():
    """Byte j of a block: element j low, element j + 16 high."""
    rows = to_gguf(every_code())
    assert rows.shape == (2, 34)
    assert rows[0, :3].tolist() == [0, 0x00, 0x11]
    assert rows[1, 17:20].tolist() == [254, 0xFF, 0xEE]
    mx = MX(torch.arange(32, dtype=torch.uint8)[None] // 16 * 5 + 1, torch.tensor([[130]], dtype=torch.uint8), "mxfp4")
    assert to_gguf(mx).tolist() == [[130, *[0x61] * 16]]


shapes = st.sampled_from([(1, 32), (3, 64), (2, 3, 96), (32,)])


@given(shape=shapes, seed=st.integers(0, 2**31))
def test_both_layouts_give_back_every_bit(shape, seed):
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=gen).byte()
    scales = torch.randint(0, 255, (*shape[:-1], shape[-1] // 32), generator=gen).byte()
    for back in (unpack(*pack(MX(codes, scales, "mxfp4"))), from_gguf(to_gguf(MX(codes, scales, "mxfp4")))):
        assert torch.equal(back.codes, codes)
        assert torch.equal(back.scales, scales)
        assert back.fmt == "mxfp4"


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
def test_ggml_reads_the_values_that_we_decode(rule):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=gen) * torch.exp2(torch.randint(-140, 120, (64, 1), generator=gen).float())
    for mx in (encode(x, "mxfp4", rule), unpack(*pack(encode(x.bfloat16(), "mxfp4", rule))), every_code()):
        with np.errstate(over="ignore"):  # scale 254 times 4 is Inf to both
            theirs = dequantize(to_gguf(mx).numpy(), gguf.GGMLQuantizationType.MXFP4)
        assert torch.equal(torch.from_numpy(theirs), decode(mx))


def test_a_nan_scale_survives_packing_and_is_refused_by_gguf():
    mx = encode(torch.full((1, 32), torch.nan))
    assert unpack(*pack(mx)).scales.tolist() == [[255]]
    with pytest.raises(UserError, match=r"^blk\.0 has a block whose scale is NaN"):
        to_gguf(mx, "blk.0")
    with pytest.raises(UserError, match="scale byte 255"):
        from_gguf(torch.full((1, 17), 255, dtype=torch.uint8))


def test_tensors_that_are_no_pair_are_refused_by_name():
    packed, scale = pack(encode(torch.randn(4, 64)))
    for bad in (
        (packed.int(), scale),
        (packed, scale.float()),
        (packed[:, :-1], scale),
        (packed[:2], scale),
        (packed, scale[:, 0]),
    ):
        with pytest.raises(UserError, match=r"^experts\.0\.w1_(packed|scale)"):
            unpack(*bad, name="experts.0.w1")
    for rows in (torch.zeros(2, 18, dtype=torch.uint8), torch.zeros(2, 17)):
        with pytest.raises(UserError, match="GGUF MXFP4 rows"):
            from_gguf(rows)
    with pytest.raises(ValueError, match="only mxfp4 is packed"):
        pack(encode(torch.randn(4, 64), "mxfp8"))


# ------------------------------------------------------- quantization_config


def as_stored() -> dict[str, Any]:
    return json.loads(json.dumps(config_dict()))


def test_the_config_says_what_kimi_k3s_says():
    config = as_stored()
    weights = config["config_groups"]["group_0"]["weights"]
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "mxfp4-pack-quantized"
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert config["config_groups"]["group_0"]["input_activations"] is None
    expected = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    assert {k: weights[k] for k in expected} == expected
    assert weights["scale_dtype"] == "torch.uint8"
    assert weights["dynamic"] is False
    assert config["ignore"] == list(K3_IGNORE)


@pytest.mark.parametrize("ignore", [K3_IGNORE, (), ("lm_head", "re:.*router$")])
def test_a_config_reads_back(ignore):
    assert read_config(json.loads(json.dumps(config_dict(Scheme(ignore))))) == Scheme(ignore)


def test_variants_that_mean_the_same_are_read():
    config = as_stored()
    del config["format"]  # the group says it
    config["version"] = "0.14.1"
    config["global_compression_ratio"] = 3.5
    config["config_groups"]["group_0"]["weights"].update(observer=None, zp_dtype="torch.float8_e4m3fn")
    assert read_config(config) == Scheme()
    config = as_stored()
    del config["config_groups"]["group_0"]["format"]
    config["ignore"] = None
    assert read_config(config) == Scheme(())


REFUSED = [
    ("quant_method", "fp8"), ("format", "nvfp4-pack-quantized"), ("quantization_status", "initialized"),
    ("kv_cache_scheme", {"num_bits": 8}), ("sparsity_config", {"format": "dense"}), ("transform_config", {"a": 1}),
    ("something_new", 1), ("config_groups", {}), ("config_groups", None), ("ignore", "lm_head"), ("ignore", ["re:("]),
    ("config_groups.group_0", None), ("config_groups.group_0.format", "pack-quantized"),
    ("config_groups.group_0.targets", ["Linear", "Embedding"]),
    ("config_groups.group_0.input_activations", {"num_bits": 8}),
    ("config_groups.group_0.output_activations", {"num_bits": 8}), ("config_groups.group_0.weights", None),
    ("config_groups.group_0.weights.num_bits", 8), ("config_groups.group_0.weights.num_bits", None),
    ("config_groups.group_0.weights.type", "int"), ("config_groups.group_0.weights.group_size", 16),
    ("config_groups.group_0.weights.strategy", "tensor_group"), ("config_groups.group_0.weights.symmetric", False),
    ("config_groups.group_0.weights.symmetric", 1), ("config_groups.group_0.weights.dynamic", True),
    ("config_groups.group_0.weights.scale_dtype", "torch.float8_e4m3fn"),
    ("config_groups.group_0.weights.actorder", "group"), ("config_groups.group_0.weights.block_structure", [128, 128]),
    ("config_groups.group_0.weights.something_new", True),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_everything_else_is_refused_by_field(path, value):
    config = copy.deepcopy(as_stored())
    *parents, last = path.split(".")
    table = config
    for part in parents:
        table = table[part]
    table[last] = value
    with pytest.raises(UserError) as refusal:
        read_config(config)
    assert str(refusal.value).startswith(f"quantization_config.{path}")


def test_a_second_group_and_a_missing_format_are_refused():
    config = as_stored()
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"]
    with pytest.raises(UserError, match="only one group"):
        read_config(config)
    config = as_stored()
    del config["format"], config["config_groups"]["group_0"]["format"]
    with pytest.raises(UserError, match=f"format is missing; {FORMAT}"):
        read_config(config)


@pytest.mark.parametrize(
    ("module", "covered"),
    [
        ("model.layers.3.block_sparse_moe.experts.17.w1", True),
        ("model.layers.3.block_sparse_moe.experts.17.w2", True),
        ("model.layers.3.self_attn.q_proj", False),
        ("model.layers.3.block_sparse_moe.shared_experts.w1", False),
        ("model.layers.0.mlp.gate_up_proj", False),
        ("lm_head", False),
        ("model.layers.3.mlp.gate", True),
    ],
)
def test_names_are_matched_as_compressed_tensors_does(module, covered):
    assert Scheme().covers(module) is covered


def test_a_plain_name_is_matched_whole():
    scheme = Scheme(("lm_head", "re:w1"))
    assert not scheme.covers("lm_head")
    assert scheme.covers("model.lm_head")
    assert not scheme.covers("w13")
    assert scheme.covers("experts.w1")
