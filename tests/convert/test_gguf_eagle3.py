"""A draft as a GGUF file: llama.cpp's names, rotary rows in its order, a map of ids in place of offsets."""

from pathlib import Path

import gguf
import pytest
import tiny
import torch

from nonet.convert.gguf_decoder import permute
from nonet.convert.gguf_eagle3 import export_eagle3
from nonet.draft.config import eagle3_config
from nonet.draft.export import export
from nonet.draft.model import Draft, started
from nonet.model import Model, Rope, hf
from nonet.types import UserError

LLAMA = dict(layers=8, mixers=("gqa",) * 8, qk_norm=False, qkv_bias=False, o_bias=False, rope=Rope(theta=500.0))


@pytest.fixture
def target(policy_directory, nano, tmp_path) -> tuple[Model, Path]:
    model = tiny.model("gqa", vocab=nano.vocab_size, **LLAMA)
    hf.save(model, tmp_path / "target")
    hf.copy_tokenizer(nano.directory, tmp_path / "target")
    return model, tmp_path / "target"


def written(target: tuple[Model, Path], folder: Path, **more) -> tuple[Draft, Path]:
    model, directory = target
    ids = torch.randperm(model.config.vocab_size)[:40].sort().values
    draft = started(eagle3_config(model.config, draft_vocab=40, **more), model, ids)
    published = export(draft, directory, folder / "published", "vllm")
    return draft, export_eagle3(published, directory, folder / "draft.gguf")


def test_every_tensor_is_there_under_llama_cpps_name(target, tmp_path):
    draft, file = written(target, tmp_path)
    reader = gguf.GGUFReader(file)
    found = {t.name: torch.tensor(t.data.copy()) for t in reader.tensors}
    assert len(found) == len(list(draft.named_parameters())) + 1
    torch.testing.assert_close(found["fc.weight"], draft.fc.weight.data)
    torch.testing.assert_close(found["output.weight"], draft.lm_head.weight.data)
    layer = draft.layer
    torch.testing.assert_close(found["blk.0.attn_norm_2.weight"], layer.hidden_norm.weight.data)
    heads = draft.config.layer.gqa_kv_heads
    torch.testing.assert_close(found["blk.0.attn_k.weight"], permute(layer.self_attn.k_proj.weight.data, heads))
    assert found["d2t"].tolist() == draft.d2t_W.tolist()


def test_the_settings_are_the_drafts_and_the_vocabulary_the_targets(target, tmp_path):
    _, file = written(target, tmp_path, norm_before_residual=True, taps=(0, 3, 7))
    fields = {k: f.contents() for k, f in gguf.GGUFReader(file).fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [0, 3, 7]
    assert fields["eagle3.target_hidden_size"] == target[0].config.d_model
    assert fields["eagle3.norm_before_residual"] is True and fields["eagle3.norm_before_fc"] is False
    assert fields["eagle3.rope.freq_base"] == 500.0
    assert len(fields["tokenizer.ggml.tokens"]) == target[0].config.vocab_size


@pytest.mark.parametrize(
    ("more", "says"),
    [({"taps": (2, 4)}, "exactly 3 taps"), ({"norm_output": True}, "norm_output"), ({"fc_norm": True}, "fc_norm")],
)
def test_what_llama_cpp_has_no_place_for_is_refused(target, tmp_path, more, says):
    with pytest.raises(UserError, match=says):
        written(target, tmp_path, **more)
    assert not (tmp_path / "draft.gguf").exists()
