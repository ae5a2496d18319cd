"""model/peft.py against the peft package itself: merged, our model says what PEFT's wrapped one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from nonet.model import Model, hf
from nonet.model.peft import CONFIG, WEIGHTS, base_of, is_adapter, merge
from nonet.types import UserError

peft = pytest.importorskip("peft", reason="pip install peft")

LORA = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "o_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("base")
    hf.save(tiny.model("gqa", qk_norm=False, o_bias=False, qkv_bias=False, tie_embeddings=False, rope=tiny.Rope()), out)
    return out


def adapted(base: Path, out: Path, **over) -> torch.Tensor:
    """Save an adapter of random numbers in `out`; the logits of what PEFT makes of it."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(plain, peft.LoraConfig(**{**LORA, **over}))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=noise) * 0.1)
        logits = model.eval()(tiny.tokens(2, 9)).logits
    model.save_pretrained(out)
    return logits


def merged(out: Path) -> Model:
    model = hf.load(base_of(out))
    merge(model, out)
    return model


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"o_proj": 5}, "alpha_pattern": {"layers.1.self_attn.q_proj": 30}},
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "embedding", "saved head"],
)
def test_merged_it_says_what_peft_says(over, base, tmp_path):
    wanted = adapted(base, tmp_path, **over)
    assert is_adapter(tmp_path) and not is_adapter(base)
    with torch.no_grad():
        plain, ours = (m.logits(m(tiny.tokens(2, 9))) for m in (hf.load(base), merged(tmp_path)))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    assert (plain - wanted).abs().max() > 0.05


def edited(base: Path, out: Path, **config) -> Path:
    adapted(base, out)
    (out / CONFIG).write_text(json.dumps(json.loads((out / CONFIG).read_text()) | config))
    return out


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3': only LORA can be merged"),
        ({"use_dora": True}, "use_dora = True: not a sum of deltas"),
        ({"bias": "all"}, "bias = 'all': not a sum of deltas"),
        ({"base_model_name_or_path": "gone"}, "base_model_name_or_path = 'gone': no such model directory"),
    ],
)
def test_what_is_not_a_sum_of_deltas_is_refused(config, told, base, tmp_path):
    with pytest.raises(UserError, match=told):
        merged(edited(base, tmp_path, **config))


def test_an_adapter_of_another_model_is_refused_by_tensor(base, tmp_path):
    adapted(base, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    first, *_ = sorted(n for n in weights if "lora_A" in n)
    for changed, told in (
        ({first.replace("layers.0", "layers.7"): weights[first].clone()}, "the model has no such layer"),
        ({first: weights[first][:, :-1].contiguous()}, r"makes \[\d+, \d+\], and the model's is"),
        (
            {first.replace("lora_A", "lora_B"): None},
            "lacks base_model.model.*lora_B.weight; the adapter was saved in part",
        ),
    ):
        new = {n: t for n, t in ({**weights, **changed}).items() if t is not None}
        save_file(new, tmp_path / WEIGHTS)
        with pytest.raises(UserError, match=told):
            merged(tmp_path)
