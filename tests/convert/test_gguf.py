"""The GGUF reader on small files: every tensor, every metadata field, and the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
import torch

from nonet.convert.gguf_reader import GGUFFile, unpermute
from nonet.convert.gguf_tokenizer import build_tokenizer, token_ids, tokenizer_config
from nonet.model import Rope
from nonet.types import UserError

CASES = [
    ("llama", {}),
    ("llama", {"tie_embeddings": False, "kv_heads": 4}),
    ("llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ("llama", {"kv_heads": 1, "rope": Rope(theta=500000.0, scaling="llama3", factor=32.0)}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32, "tie_embeddings": False}),
]


@pytest.mark.parametrize(("arch", "fields"), CASES)
def test_config_and_tensors(arch: str, fields: dict, tmp_path: Path):
    truth = tiny_gguf.write(tmp_path / "m.gguf", arch, **fields)
    assert (tmp_path / "m.gguf").stat().st_size < 250_000
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.config == tiny_gguf.config(arch, **fields)
    read = dict(file.tensors())
    assert set(read) == set(truth)
    for name, value in truth.items():
        assert read[name].dtype == torch.float32
        assert np.array_equal(read[name].numpy(), value), name


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_equal_transformers_own_reader(arch: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    reading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    tiny_gguf.write(tmp_path / "m.gguf", arch)
    header = reading.load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=False)["config"]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**header))
    theirs = reading.load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(GGUFFile(tmp_path / "m.gguf").tensors())
    assert len(ours) >= 20
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_linear_rope(tmp_path: Path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    tiny_gguf.write(tmp_path / "m.gguf", metadata=scaling)
    assert GGUFFile(tmp_path / "m.gguf").config.rope == Rope(theta=5000.0, scaling="linear", factor=4.0)


def test_unpermute_inverts_llama_cpp_order():
    rows = np.arange(48 * 3).reshape(48, 3)
    for heads in (1, 2, 3):
        assert np.array_equal(unpermute(tiny_gguf.permuted(rows, heads), heads), rows)


# ------------------------------------------------------------------ tokenizer


def tokenizer(tmp_path: Path, pre: str = "smollm", **metadata):
    tiny_gguf.write(tmp_path / "m.gguf", pre=pre, metadata={k.replace("__", "."): v for k, v in metadata.items()})
    return build_tokenizer(GGUFFile(tmp_path / "m.gguf"))


def test_smollm_splits_digits_before_anything_else(tmp_path: Path):
    tok = tokenizer(tmp_path)
    assert tok.encode("    7").tokens == ["ĠĠĠĠ", "7"]
    assert tok.encode("123").tokens == ["1", "2", "3"]
    assert tok.encode("hello hello").tokens == ["hello", "Ġhello"]


def test_qwen2_and_llama3_split_digits_their_own_way(tmp_path: Path):
    qwen = tokenizer(tmp_path, "qwen2")
    assert qwen.encode("1234").tokens == ["1", "2", "3", "4"]
    assert qwen.encode("e\u0301").ids == qwen.encode("\u00e9").ids, "NFC"
    llama = tokenizer(tmp_path, "llama-bpe", tokenizer__ggml__add_bos_token=False)
    assert llama.encode("12345").tokens == ["123", "4", "5"]
    assert llama.encode("    hello").tokens == ["ĠĠ", "Ġ", "Ġhello"]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_text_survives(pre: str, tmp_path: Path):
    tok = tokenizer(tmp_path, pre)
    for text in ("", "hello", " a\n\n  b\t1,234.5", "naïve 你好 🙂", "def f(x):\n    return x  # 10%"):
        assert tok.decode(tok.encode(text, add_special_tokens=False).ids) == text


def test_special_and_user_defined_tokens(tmp_path: Path):
    tok = tokenizer(tmp_path)
    ids = tok.encode("<|im_start|>hello<tool><|im_end|>").ids
    vocab = tiny_gguf.vocabulary()
    assert ids == [1, vocab.index("hello"), vocab.index("<tool>"), 2]
    assert tok.decode(ids, skip_special_tokens=True) == "hello<tool>"
    assert tok.token_to_id("[PAD0]") is None
    assert [tok.id_to_token(i) for i in range(len(vocab) - 1)] == vocab[:-1]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path):
    assert tokenizer(tmp_path, tokenizer__ggml__add_bos_token=True).encode("he").tokens[0] == "<|im_start|>"
    both = tokenizer(tmp_path, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True)
    assert both.encode("he").tokens == ["<|im_start|>", "he", "<|im_end|>"]
    assert both.encode("he", "he").tokens == ["<|im_start|>", "he", "<|im_end|>"] * 2
    unsaid = tokenizer(tmp_path, "llama-bpe", tokenizer__ggml__add_bos_token=None)
    assert unsaid.encode("he").tokens == ["<|im_start|>", "he"]
    assert tokenizer(tmp_path, tokenizer__ggml__add_bos_token=None).encode("he").tokens == ["he"]


def test_ids_and_template(tmp_path: Path):
    tiny_gguf.write(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    file = GGUFFile(tmp_path / "m.gguf")
    assert token_ids(file) == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    config = tokenizer_config(file)
    assert config["chat_template"] == tiny_gguf.TEMPLATE
    assert (config["bos_token"], config["unk_token"]) == ("<|im_start|>", "<|endoftext|>")


# ------------------------------------------------------------------ refusals


def read_all(path: Path) -> None:
    file = GGUFFile(path)
    build_tokenizer(file)
    token_ids(file)
    for _ in file.tensors():
        pass


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"tokenizer.ggml.pre": "deepseek-v3"}, ["tokenizer.ggml.pre = 'deepseek-v3'"]),
        ({"tokenizer.ggml.pre": None}, ["tokenizer.ggml.pre = None"]),
        ({"tokenizer.ggml.model": "llama"}, ["tokenizer.ggml.model = 'llama'"]),
        ({"tokenizer.ggml.bos_token_id": 9999}, ["bos_token_id = 9999"]),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, ["bos_token_id is missing"]),
        ({"tokenizer.ggml.merges": ["q zz"]}, ["merges holds 'q zz'"]),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, ["holds 'a' 2 times"]),
        ({"llama.attention.sliding_window": 128}, ["llama.attention.sliding_window = 128"]),
        ({"llama.expert_count": 8}, ["llama.expert_count = 8"]),
        ({"llama.logit_scale": 2.0}, ["llama.logit_scale = 2.0"]),
        ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count = 8"]),
        ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.type = 'yarn'"]),
        ({"llama.block_count": None}, ["llama.block_count is missing"]),
        ({"llama.block_count": 3}, ["lacks model.layers.2.{input_layernorm.weight,"]),
        ({"llama.feed_forward_length": 128}, ["mlp.up_proj.weight} has shape [96, 64] in m.gguf, needs [128, 64]"]),
    ],
)
def test_what_the_reader_does_not_know(metadata: dict, parts: list[str], tmp_path: Path):
    tiny_gguf.write(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(UserError) as caught:
        read_all(tmp_path / "m.gguf")
    for part in ["m.gguf", *parts]:
        assert part in str(caught.value)


def test_other_architectures(tmp_path: Path):
    writer = tiny_gguf.gguf.GGUFWriter(str(tmp_path / "m.gguf"), "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"m\.gguf: general\.architecture = 'gemma3'"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, 0.5, 0.999])
def test_truncated_file(keep: float, tmp_path: Path):
    tiny_gguf.write(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(UserError, match=r"m\.gguf: truncated"):
        read_all(tmp_path / "m.gguf")


def test_llama3_divisors_that_are_not_llama3s(tmp_path: Path):
    rope = Rope(theta=500000.0, scaling="llama3", factor=8.0, original_max_position=64)
    tiny_gguf.write(tmp_path / "m.gguf", rope=rope)
    with pytest.raises(UserError, match=r"m\.gguf: rope_freqs\.weight"):
        read_all(tmp_path / "m.gguf")
