"""`nonet draft MODEL --data FILE`: every stage on a tiny model, twice, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nonet.cli import app
from nonet.draft import files
from nonet.draft.data import read
from nonet.model import hf
from nonet.pipeline.draft_eval import Asked, interval, lengthened, warning
from nonet.pipeline.draft_run import run
from nonet.pipeline.drafting import Job
from nonet.types import UserError

SMALL = (
    *("draft.vocabulary=80", "draft.window=64", "draft.batch_tokens=128", "draft.features=float32", "draft.bf16=false"),
    *("draft.decode=float32", "answers.max_tokens=24", "answers.batch=8", "train.steps=6", "train.eval_every=3"),
    *("train.unroll=3", "eval.tokens=3", "eval.max_tokens=16", "eval.contexts=[64]", "eval.at_each_context=2"),
    *("eval.timed=2", "eval.timed_tokens=8", "eval.batches=[1]", "data.share=0.3"),
)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": f"reverse {'abcdefg'[i % 7]} {i}"}] for i in range(24)]
    file.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    return file


def job(model: Path, chats: Path, out: Path, *more: str) -> Job:
    return Job.of(model, [str(chats)], (), out, [*SMALL, *more])


@pytest.mark.parametrize("form", ["mtp", "eagle3"])
def test_everything_in_one_go_and_again_from_where_it_stopped(policy_directory, chats, tmp_path, form, capsys):
    layer = ("draft.d_ff=32",) if form == "eagle3" else ()
    out = tmp_path / "run"
    run(job(policy_directory, chats, out, f"draft.form={form}", *layer))
    said = capsys.readouterr()
    assert "estimate: 24 conversations" in said.err and "GB of features on disk" in said.err
    assert re.search(r"80 of \d+ tokens cover \d+\.\d+% of what the target wrote", said.err)
    assert "acceptance length, bonus token included, 3 drafted (at most 4)" in said.out
    assert re.search(r"took: .* minutes \(answers .*, features .*, training .*, measurement .*\)", said.err)
    target = hf.load(policy_directory)
    draft = files.load(out / "draft", target, files.vocabulary_hash(policy_directory))
    assert draft.config.form == form and draft.config.trained_steps <= 6
    measured = json.loads((out / "measured.json").read_text())
    assert set(measured["modes"]) == {"greedy", "sampled", "one-hot"}
    assert all(1 <= m["low"] <= m["length"] <= m["high"] <= 4 for m in measured["modes"].values() if m["requests"])
    assert measured["speed"][0]["identical"] == 1.0
    page = (out / "report.html").read_text()
    assert "Acceptance, by real verification" in page and "http" not in page.replace("http-equiv", "")
    written = (out / "draft" / "model.safetensors").stat().st_mtime_ns
    run(job(policy_directory, chats, out, f"draft.form={form}", *layer))
    assert (out / "draft" / "model.safetensors").stat().st_mtime_ns == written


def test_other_settings_in_the_same_directory_are_refused(policy_directory, chats, tmp_path):
    job(policy_directory, chats, tmp_path / "run").answer()
    with pytest.raises(UserError, match=r"train\.steps: 6 -> 7"):
        job(policy_directory, chats, tmp_path / "run", "train.steps=7").answer()


def test_data_without_a_held_out_side_and_no_data_are_refused(policy_directory, chats, tmp_path):
    with pytest.raises(UserError, match="no conversation is held out"):
        job(policy_directory, chats, tmp_path / "a", "data.share=1e-9").answer()
    with pytest.raises(UserError, match=r"data: none given; use --data FILE\.jsonl"):
        Job.of(policy_directory, (), (), tmp_path / "b", ())


def test_the_command_takes_a_model_or_a_verb(policy_directory, chats, tmp_path):
    runner = CliRunner()
    sets = [part for value in SMALL for part in ("--set", value)]
    data = ["--data", str(chats), "--out", str(tmp_path / "run"), *sets]
    result = runner.invoke(app, ["draft", "answers", str(policy_directory), *data])
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "run" / "answers.jsonl").read_text().splitlines()) == 1 + len(read(chats))
    result = runner.invoke(app, ["draft", str(policy_directory), *data])
    assert result.exit_code == 0, result.output
    draft, target = str(tmp_path / "run" / "draft"), ["--target", str(policy_directory)]
    result = runner.invoke(app, ["draft", "eval", draft, *target, "--data", str(chats), "--max-tokens", "8"])
    assert "one-hot" in result.output + str(result.exception)
    stitched = str(tmp_path / "stitched")
    result = runner.invoke(app, ["draft", "export", draft, stitched, *target, "--to", "mtp"])
    assert isinstance(result.exception, UserError) and "--project" in str(result.exception)
    result = runner.invoke(app, ["draft", "export", draft, stitched, *target, "--to", "mtp", "--project"])
    assert result.exit_code == 0 and hf.load(Path(stitched)).mtp is not None
    result = runner.invoke(app, ["draft", "eval", "lookup", *target, "--data", str(chats), "--max-tokens", "8"])
    assert "one-hot" in result.output + str(result.exception)


def test_an_acceptance_of_one_is_no_result():
    """TRT-LLM#18905: 1.0097 was recorded as a baseline that passes."""
    assert "which is a mistake and no result" in warning({"modes": {"greedy": {"length": 1.0097}}})
    assert "no result" in warning({"modes": {"greedy": {"requests": 0}}})
    assert warning({"modes": {"greedy": {"length": 1.4}}}) == ""


def test_the_interval_holds_the_ratio_of_sums_and_narrows():
    few, many = interval([(3, 2), (1, 4)] * 4), interval([(3, 2), (1, 4)] * 100)
    assert few[0] <= many[0] <= 1 + 4 / 6 <= many[1] <= few[1]
    assert interval([(8, 2)] * 5) == (5.0, 5.0)


def test_contexts_are_as_long_as_they_say_and_end_in_the_prompt():
    asked = [Asked(str(i), "d", tuple(range(100 * i, 100 * i + 7))) for i in range(4)]
    for a, long in zip(asked, lengthened(asked, 20, 4), strict=True):
        assert len(long.tokens) == 20 and long.tokens[-7:] == a.tokens
