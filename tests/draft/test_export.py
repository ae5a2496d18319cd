"""Drafts for other engines, and the linter that reads them back: every flag, id, map and norm as each engine would."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from nonet.draft.config import eagle3_config, mtp_config
from nonet.draft.export import export
from nonet.draft.lint import Golden, compared, lint
from nonet.draft.model import Draft, started
from nonet.draft.published import Files, draft_of
from nonet.draft.readings import ENGINES, meant
from nonet.model import Model, ModelConfig, Rope, hf
from nonet.types import UserError

LLAMA = dict(
    layers=8, mixers=("gqa",) * 8, qk_norm=False, qkv_bias=False, o_bias=False, rope=Rope(theta=500.0),
    max_position=40960, tie_embeddings=True,
)  # fmt: skip
FLAGS = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny.model("gqa", **LLAMA)


def made(target: Model, words: int | None = 20, seed: int = 3, **more) -> Draft:
    """A draft in which nothing is zero, one or the target's."""
    config = eagle3_config(target.config, draft_vocab=words, **more)
    ids = None if words is None else torch.randperm(target.config.vocab_size)[:words].sort().values
    draft = started(config, target, ids)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn(p.shape, generator=noise) * 0.3)
    return draft


def states(folder: Path, target: Model) -> dict[str, str]:
    return {v.engine: v.state for v in lint(folder, target)}


def edited(folder: Path, drop: tuple[str, ...] = (), **fields) -> Path:
    """The directory with other fields of config.json; a dotted name reaches into a table."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in drop:
        config.pop(key)
    for key, value in fields.items():
        table, _, leaf = key.replace("__", ".").rpartition(".")
        (config[table] if table else config)[leaf] = value
    file.write_text(json.dumps(config))
    return folder


def reweighed(folder: Path, drop: tuple[str, ...] = (), **tensors) -> Path:
    file = folder / "model.safetensors"
    found = {k: v for k, v in load_file(file).items() if k not in drop}
    save_file({**found, **tensors}, file)
    return folder


# ------------------------------------------------------------------------------- every engine computes the draft


@pytest.mark.parametrize("words", [20, None])
def test_one_directory_is_right_for_vllm_sglang_trtllm_and_llamacpp(target, tmp_path, words):
    draft = made(target, words)
    out = export(draft, tmp_path, tmp_path / "out", "vllm")
    verdicts = lint(out, target)
    assert {v.engine: v.state for v in verdicts} == dict.fromkeys(ENGINES, "right")
    assert all(v.gap == 0 and v.agreement == 1 for v in verdicts)


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_what_is_exported_computes_what_was_trained(target, tmp_path, to):
    draft = made(target)
    out = export(draft, tmp_path, tmp_path / "out", to)
    golden = Golden(target)
    reader = "vllm" if to == "speculators" else to
    files = Files.of(out)
    gap, agreement = compared(
        golden.logits(draft_of(ENGINES[reader](files, target), files, target)), golden.logits(draft)
    )
    assert gap == 0 and agreement == 1


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_every_flag_reaches_vllm_and_changes_the_logits(target, tmp_path, flag, to):
    """vllm#38111, #42143, #46488: flags were dropped by the config's reader."""
    with_flag = made(target, **{flag: True})
    out = export(with_flag, tmp_path, tmp_path / "out", to)
    files, golden = Files.of(out), Golden(target)
    read = draft_of(ENGINES["vllm"](files, target), files, target)
    assert compared(golden.logits(read), golden.logits(with_flag)) == (0, 1)
    plain = made(target)
    plain.load_state_dict(with_flag.state_dict(), strict=False)
    assert compared(golden.logits(plain), golden.logits(with_flag))[0] > 1e-3


def test_positions_and_rotary_settings_are_the_targets_and_never_a_default(target, tmp_path):
    """SpecForge#271: 2,048 positions in the draft's config, 40,960 in the target's."""
    out = export(made(target), tmp_path, tmp_path / "out", "vllm")
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 40960
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    edited(out, max_position_embeddings=2048)
    assert states(out, target)["vllm"] == "wrong without a word"
    edited(out, drop=("max_position_embeddings",))
    assert "2048" in lint(out, target, ["vllm"])[0].silent[0]


def test_the_embedding_is_left_out_or_is_the_targets(target, tmp_path):
    """TorchSpec#38: a random embedding was exported; one engine used it, another did not."""
    out = export(made(target), tmp_path, tmp_path / "out", "vllm")
    assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
    embed = target.embed_tokens.weight.detach().clone()
    reweighed(out, **{"embed_tokens.weight": embed})
    assert set(states(out, target).values()) == {"right"}
    reweighed(out, **{"embed_tokens.weight": torch.randn_like(embed)})
    found = lint(out, target, ["vllm", "sglang"])
    assert all("embed_tokens differs from the target's" in str(v.silent) for v in found)
    assert found[0].gap == 0 and found[1].gap > 1e-3  # vLLM computes with it, SGLang does not


# ------------------------------------------------------------------------------- maps


def test_the_map_holds_offsets_and_a_missing_one_is_refused(target, tmp_path):
    """verl-SpeCo#66, Automodel#2447: without it, or in a file of its own, rows became the first ids."""
    draft = made(target)
    out = export(draft, tmp_path, tmp_path / "out", "vllm")
    offsets = load_file(out / "model.safetensors")["d2t"]
    assert torch.equal(offsets + torch.arange(len(offsets)), draft.d2t_W)
    reweighed(out, drop=("d2t",))
    with pytest.raises(UserError, match="which tokens its rows stand for is not said"):
        lint(out, target)
    reading = ENGINES["vllm"](Files.of(out), target)
    assert "row i is taken for token i" in reading.silent[0]


def test_ids_in_place_of_offsets_are_refused(target, tmp_path):
    draft = made(target)
    out = export(draft, tmp_path, tmp_path / "out", "vllm")
    reweighed(out, d2t=draft.d2t_W)
    with pytest.raises(UserError, match="d2t"):
        lint(out, target)


# ------------------------------------------------------------------------------- layer ids


def test_ids_are_written_in_both_conventions(target, tmp_path):
    config = json.loads((export(made(target), tmp_path, tmp_path / "out", "sglang") / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_ids_for_one_engine_only_are_wrong_for_the_other(target, tmp_path):
    """Taps that are nobody's default, so that a reader who misses the ids computes something else."""
    for_vllm = export(made(target, taps=(1, 3, 6)), tmp_path, tmp_path / "a", "vllm")
    edited(for_vllm, eagle_config={"use_aux_hidden_state": True})
    assert states(for_vllm, target) == {
        "vllm": "right", "sglang": "wrong without a word", "trtllm": "wrong without a word", "llamacpp": "right"
    }  # fmt: skip
    for_sglang = export(made(target, taps=(1, 3, 6)), tmp_path, tmp_path / "b", "vllm")
    edited(for_sglang, drop=("eagle_aux_hidden_state_layer_ids",))
    found = states(for_sglang, target)
    assert (found["sglang"], found["vllm"]) == ("right", "wrong without a word")
    assert "taps is [0, 2, 5], meant is [1, 3, 6]" in str(lint(for_sglang, target, ["vllm"])[0].silent)


def test_ids_that_contradict_each_other_are_refused(target, tmp_path):
    out = export(made(target), tmp_path, tmp_path / "out", "vllm")
    edited(out, eagle_config__eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    with pytest.raises(UserError, match="write the nested ones one lower, or remove one"):
        lint(out, target)


@pytest.mark.parametrize(("ids", "taps"), [([2, 30, 58], (2, 30, 58)), ([1, 29, 57], (2, 30, 58))])
def test_the_deepseek_rule_for_ids_on_a_target_of_61_layers(ids, taps, tmp_path):
    """sglang#25454: the two spellings of the same three states."""
    shape = {**tiny.HYBRID, "layers": 61, "d_model": 8, "d_ff": 8, "heads": 2}
    deep = Model(ModelConfig(vocab_size=61, **shape))
    layer = {"heads": 2, "kv_heads": 1, "head_dim": 4, "rope": Rope(), "activation": "silu"}
    out = export(
        started(eagle3_config(deep.config, taps=(2, 30, 58), layer=layer), deep), tmp_path, tmp_path / "o", "vllm"
    )
    edited(out, drop=("eagle_aux_hidden_state_layer_ids",), eagle_config__eagle_aux_hidden_state_layer_ids=ids)
    files = Files.of(out)
    assert ENGINES["sglang"](files, deep).taps == meant(files, deep).taps == taps


def test_the_state_after_the_last_layer_is_vllms_only(target, tmp_path):
    """vllm#46788, sglang#32334: a tap at the number of layers."""
    draft = made(target, taps=(2, 4, 8))
    with pytest.raises(UserError, match="no state after the last layer"):
        export(draft, tmp_path, tmp_path / "a", "sglang")
    found = states(export(draft, tmp_path, tmp_path / "b", "vllm"), target)
    assert found["vllm"] == "right" and found["sglang"] == "refuses to load"


def test_a_fusion_of_another_number_of_taps_is_refused(target, tmp_path):
    out = export(made(target), tmp_path, tmp_path / "out", "vllm")
    edited(out, eagle_aux_hidden_state_layer_ids=[2, 4], drop=("eagle_config",))
    with pytest.raises(UserError, match=r"fc\.weight reads 96 values, 2 taps"):
        lint(out, target)


# ------------------------------------------------------------------------------- flags and names


def test_a_residual_that_sglang_lacks_is_refused_on_export_and_found_by_lint(target, tmp_path):
    draft = made(target, norm_before_residual=True)
    with pytest.raises(UserError, match="SGLang has no such residual"):
        export(draft, tmp_path, tmp_path / "a", "sglang")
    out = export(draft, tmp_path, tmp_path / "b", "vllm")
    found = {v.engine: v for v in lint(out, target)}
    assert found["vllm"].state == "right"
    assert found["sglang"].state == "wrong without a word"
    assert "norm_before_residual = true is not implemented and passed over" in found["sglang"].silent


def test_speculators_missing_flag_is_read_as_true_by_vllm(target, tmp_path):
    out = export(made(target), tmp_path, tmp_path / "out", "speculators")
    assert lint(out, target, ["vllm"])[0].state == "right"
    edited(out, drop=("norm_before_residual",))
    found = lint(out, target, ["vllm"])[0]
    assert "norm_before_residual is True, meant is False" in found.silent
    assert states(out, target)["sglang"] == "refuses to load"


def test_older_names_are_read_and_unknown_ones_are_not_passed_over(target, tmp_path):
    """sglang#35797: tensors that were silently skipped."""
    out = export(made(target), tmp_path, tmp_path / "out", "vllm")
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in load_file(out / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors")
    assert set(states(out, target).values()) == {"right"}
    reweighed(out, **{"layers.1.self_attn.q_proj.weight": torch.zeros(2, 2)})
    found = states(out, target)
    assert found["vllm"] == "refuses to load" and found["sglang"] == "wrong without a word"


def test_a_draft_that_is_not_whole_is_found(target, tmp_path):
    out = export(made(target), tmp_path, tmp_path / "out", "vllm")
    reweighed(out, drop=("layers.0.hidden_norm.weight",))
    with pytest.raises(UserError, match=r"lacks layers\.0\.hidden_norm\.weight"):
        lint(out, target)


def test_nonets_own_directory_and_unknown_engines_are_refused(target, tmp_path):
    from nonet.draft.files import save

    save(made(target), tmp_path)
    with pytest.raises(UserError, match="export it first"):
        lint(tmp_path, target)
    with pytest.raises(UserError, match="engine = mlx"):
        lint(tmp_path, target, ["mlx"])


def test_an_existing_directory_is_not_overwritten(target, tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        export(made(target), tmp_path, tmp_path, "vllm")
    with pytest.raises(UserError, match="no such format"):
        export(made(target), tmp_path, tmp_path / "new", "onnx")


# ------------------------------------------------------------------------------- MTP


@pytest.fixture
def k3(nano, tmp_path) -> tuple[Model, Path]:
    model = tiny.model("k3", vocab=nano.vocab_size, mtp_layers=1)
    hf.save(model, tmp_path / "target")
    hf.copy_tokenizer(nano.directory, tmp_path / "target")
    return model, tmp_path / "target"


def test_an_mtp_draft_is_stitched_into_its_target(k3, tmp_path):
    model, directory = k3
    draft = started(mtp_config(model.config), model)
    with torch.no_grad():
        for p in draft.mtp.parameters():
            p.add_(0.01)
    out = export(draft, directory, tmp_path / "out", "mtp")
    stitched = hf.load(out)
    tokens = tiny.tokens(1, 9, vocab=model.config.vocab_size)
    golden = Golden(model)
    with torch.inference_mode():
        hidden = stitched(tokens)
        torch.testing.assert_close(hidden, model(tokens), atol=0, rtol=0)
        got = stitched.mtp_logits(golden.tokens_BT, stitched(golden.tokens_BT))[0]
    torch.testing.assert_close(got, golden.logits(draft)[0], atol=1e-5, rtol=0)
    assert (out / "tokenizer.json").exists()


def test_a_trained_fusion_has_no_place_in_mtp_weights_and_says_what_to_do(k3, tmp_path):
    model, directory = k3
    draft = started(mtp_config(model.config), model)
    with torch.no_grad():
        draft.fc.weight[0, 0] += 1e-3
    with pytest.raises(UserError, match=r"--project, which costs acceptance: measure it with nonet draft eval"):
        export(draft, directory, tmp_path / "a", "mtp")
    assert (export(draft, directory, tmp_path / "b", "mtp", project=True) / "config.json").exists()


def test_forms_are_not_mixed_up(k3, target, tmp_path):
    model, directory = k3
    with pytest.raises(UserError, match="export it --to mtp"):
        export(started(mtp_config(model.config), model), directory, tmp_path / "a", "vllm")
    with pytest.raises(UserError, match="is no MTP layer"):
        export(made(target), directory, tmp_path / "b", "mtp")
