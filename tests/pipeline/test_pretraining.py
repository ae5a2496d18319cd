"""`nonet pretrain`, `nonet tokenizer`, and `nonet check` on a pretraining recipe: from text to a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nonet.chat import Tokenizer
from nonet.cli import app
from nonet.lm import vocabulary
from nonet.lm.advice import TOKENS_PER_PARAMETER, advise, widened, widths
from nonet.lm.pretrain import PretrainConfig, StageConfig
from nonet.model import Model, ModelConfig, hf
from nonet.model.init import initialise
from nonet.pipeline import load_recipe, run_recipe
from nonet.pipeline.check import plan, warnings
from nonet.pipeline.pretraining import pretrain_recipe, run_pretrain, training_texts
from nonet.run import Run
from nonet.types import UserError

TOY = """
[run]
threads = 1
[start]
vocab_size = 290
[model]
d_model = 16
layers = 3
heads = 2
d_ff = 24
kda_head_dim = 8
q_lora_rank = 8
kv_lora_rank = 8
qk_nope_head_dim = 4
qk_rope_head_dim = 4
v_head_dim = 8
mtp_layers = 1
[data]
heldout = 0.2
[pretrain]
batch_tokens = 128
eval_every = 4
eval_tokens = 256
stages = [{ context = 16, steps = 6 }, { context = 32, steps = 2 }]
[advice]
probe_s = 0.01
"""
MODEL = dict(vocab_size=300, d_model=32, layers=3, heads=2, d_ff=48, kda_head_dim=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A recipe and sixty documents of JSON lines."""
    root = tmp_path_factory.mktemp("pretraining")
    (root / "toy.toml").write_text(TOY)
    made_up = [a + b + c for a in "bdgkmp" for b in "aeiou" for c in ("n", "rs", "lt")]
    documents = [f"number {i} " + " ".join(made_up[i % 9 :: 2 + i % 7]) * (1 + i % 4) for i in range(60)]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return root


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    out = folder / "run"
    command = ["pretrain", str(folder / "toy.toml"), "--data", str(folder / "texts.jsonl"), "--out", str(out)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "held-out bits per byte" in result.output and "models/pretrain" in result.output.replace("\n", "")
    return out


def test_it_leaves_a_model_directory_with_its_tokenizer(finished):
    tokenizer, model = Tokenizer(finished / "models" / "pretrain"), hf.load(finished / "models" / "pretrain")
    assert model.config.vocab_size == tokenizer.vocab_size == 290
    logits = model.logits(model(torch.tensor([tokenizer.encode("the cat sat on the")])))
    assert torch.isfinite(logits).all()


def test_stages_keep_their_weights_and_the_last_is_the_result(finished):
    kept = [hf.load(finished / "models" / f"stage-{n}") for n in ("1-context-16", "2-context-32")]
    final = hf.load(finished / "models" / "pretrain")
    same = [all(torch.equal(p, final.state_dict()[n]) for n, p in k.state_dict().items()) for k in kept]
    assert same == [False, True]


def test_the_corpus_is_described_and_the_report_written(finished):
    [made] = Run(finished).events("corpus")
    assert made["documents"] + made["heldout_documents"] == 60
    assert (finished / "corpus" / made["name"] / "meta.json").exists()
    assert "context-16" in (finished / "report.html").read_text()


def test_a_finished_run_is_skipped_whole(finished, folder):
    before = list(Run(finished).events())
    run_pretrain(pretrain_recipe([str(folder / "toy.toml")], [str(folder / "texts.jsonl")], False, ()), finished)
    assert list(Run(finished).events()) == before


def test_a_tokenizer_learns_from_no_held_out_document(folder):
    source = str(folder / "texts.jsonl")
    training = list(training_texts([source], 0.2, 10**9))
    assert len(training) == 60 - len(set(training_texts([source], 0.0, 10**9)) - set(training))
    assert len(list(training_texts([source], 0.0, 100))) < 10


def test_a_model_directory_goes_on_with_its_own_tokenizer(finished, folder, tmp_path):
    start = f"start.model={finished / 'models' / 'pretrain'}"
    values = [start, "pretrain.stages=[{context=32,steps=1,lr=1e-9}]", "pretrain.weight_decay=0.0"]
    recipe = pretrain_recipe([str(folder / "toy.toml")], [str(folder / "texts.jsonl")], False, values)
    run_pretrain(recipe, tmp_path)
    before, after = (hf.load(p / "models" / "pretrain").state_dict() for p in (finished, tmp_path))
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-6)
    assert (tmp_path / "models/pretrain/tokenizer.json").read_bytes() == (
        finished / "models/pretrain/tokenizer.json"
    ).read_bytes()


def test_a_tokenizer_too_large_for_the_model_is_refused(finished, folder, tmp_path):
    vocabulary.train(training_texts([str(folder / "texts.jsonl")], 0.0, 10**9), 295, tmp_path / "wide")
    values = [f"start.model={finished / 'models' / 'pretrain'}", f"data.tokenizer={tmp_path / 'wide'}"]
    recipe = pretrain_recipe([str(folder / "toy.toml")], [str(folder / "texts.jsonl")], False, values)
    with pytest.raises(UserError, match=r"has 295 ids, the model in start\.model only 290"):
        run_pretrain(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("files", "data", "sentence"),
    [
        ([], [], r"data\.sources: is empty; set it in the recipe, or give --data"),
        (["toy.toml"], [], r"data\.sources: is empty"),
        (["recipes/nano.toml"], ["stdlib"], r"recipes/nano\.toml: has no \[pretrain\] table"),
        (["b.txt"], ["a.txt"], r"b\.txt: is not a recipe \(\.toml\); quote a glob"),
    ],
)
def test_mistakes_are_one_sentence(folder, files, data, sentence):
    root = Path(__file__).parents[2]
    paths = [str(folder / f if f == "toy.toml" else root / f if "/" in f else f) for f in files]
    with pytest.raises(UserError, match=sentence):
        pretrain_recipe(paths, data, False, ())


def test_nothing_held_out_and_everything_held_out_are_refused(folder, tmp_path):
    for share in ("0.000001", "0.999999"):
        recipe = pretrain_recipe(
            [str(folder / "toy.toml")], [str(folder / "texts.jsonl")], False, [f"data.heldout={share}"]
        )
        with pytest.raises(UserError, match=r"data\.heldout = .* holds out|holds no text|hold no text"):
            run_pretrain(recipe, tmp_path / share)


def test_nonet_run_sends_a_pretraining_recipe_to_its_verb(folder, tmp_path):
    with pytest.raises(UserError, match="use nonet pretrain"):
        run_recipe(load_recipe([folder / "toy.toml"]), tmp_path)


def test_the_tokenizer_verb(folder, tmp_path):
    command = ["tokenizer", "train", "--data", str(folder / "texts.jsonl"), "--vocab", "280", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0 and "280 ids" in result.output
    assert Tokenizer(tmp_path).vocab_size == 280
    with pytest.raises(UserError, match="use nonet tokenizer train"):
        CliRunner().invoke(app, ["tokenizer", "make", *command[2:]], catch_exceptions=False)


# ---------------------------------------------------------------------------------- advice


def test_check_says_what_the_stages_cost_here_and_which_size_would_suit(folder):
    recipe = load_recipe([folder / "toy.toml"])
    lines = list(plan(recipe, recipe.model_config_for(300)))
    assert "stage 1-context-16: 6 steps of 8 x 16 tokens" in lines[0] and "packed" in lines[0]
    assert "documents of at least 32 tokens" in lines[1]
    assert "tokens a second measured on this machine" in lines[2]
    assert "advice: this box, 1.0 h:" in lines[3] and "20 tokens an active parameter" in lines[3]


def test_more_hours_advise_a_larger_model_of_the_same_kind():
    config = ModelConfig(**MODEL)
    pretrain = PretrainConfig(stages=(StageConfig(context=16, steps=5),), batch_tokens=64)
    small, large = (advise(config, pretrain, hours, 0.02) for hours in (0.01, 4.0))
    assert small.active < large.active
    for a in (small, large):
        assert a.tokens == TOKENS_PER_PARAMETER * a.active
        assert a.advised.d_model // a.advised.heads == config.d_model // config.heads
        assert a.advised.layers == config.layers
        assert hf.empty(a.advised).cost.active == a.active


@pytest.mark.parametrize("over", [{}, {"moe": dict(experts=4, top_k=2, d_ff=32, latent=32)}])
def test_every_width_offered_is_a_model(over):
    config = ModelConfig(**MODEL, **over)
    sizes = [active for active, _ in zip(widths(config), range(12), strict=False)]
    assert [a for a, _ in sizes] == sorted(a for a, _ in sizes)
    wide = widened(config, 6)
    assert wide.d_model == 96 and wide.d_ff == 144
    assert torch.isfinite(initialise(Model(wide), 0)(torch.tensor([[1, 2, 3]]))).all()


def test_settings_without_effect_are_named(folder):
    overrides = ["model.mtp_layers=0", "pretrain.optimizer=adamw", "model.max_position=20", "cold.steps=9"]
    recipe = load_recipe([folder / "toy.toml"], [*overrides, "pretrain.batch_tokens=64"])
    found = "\n".join(warnings(recipe, recipe.model_config_for(300)))
    for part in ("mtp_weight = 0.1", "per_head", "stages[1].context = 32", "[cold]"):
        assert part in found
    assert "rl." not in found
