"""`nonet runs`: what a reader sees of a park store."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

from nonet.cli import app
from nonet.pipeline import runs
from nonet.rl import Loop, RLConfig, park
from nonet.run import Run
from nonet.types import UserError

CONFIG = RLConfig(groups=3, samples=3, max_tokens=36, temperature=1.2, lr=1e-3, steps=4, fraction=0.4)


@pytest.fixture
def played(policy, nano, tmp_path) -> Path:
    out = tmp_path / "mine"
    Loop(policy, tiny.setting(nano, rewards={"varied": tiny.varied}), CONFIG, Run(out), seed=2).fit()
    return out


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["runs", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_list_names_the_run_with_its_step_and_its_groups(played):
    held = park.read(park.files(played / "park")[-1]).held
    (row,) = (line for line in said("list", str(played.parent)).splitlines() if "mine" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][:2] == ["mine", "4"]
    assert f"│ {len(held)} " in row


def test_show_has_a_row_for_every_trajectory_that_is_held(played):
    found = park.read(park.files(played / "park")[-1])
    shown = said("show", str(played))
    for t in (t for members in found.held.values() for t in members):
        (row,) = (line for line in shown.splitlines() if f" {t.id} " in line)
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert cells[2] == t.status
        assert cells[5] == (" ".join(map(str, t.versions)) or "-")
        assert cells[6:8] == [str(len(t.tokens)), str(t.policy_tokens)]
        assert cells[4] == (str(4 - t.versions[0]) if t.versions else "-")
    assert any("parked" in line for line in shown.splitlines())


def test_a_trajectory_is_shown_with_authors_versions_and_its_words(played, nano):
    found = park.read(park.files(played / "park")[-1])
    everyone = [t for groups in (found.held, found.gone) for members in groups.values() for t in members]
    mixed = max(everyone, key=lambda t: len(t.versions))
    assert len(mixed.versions) > 1
    shown = said("show", str(played), "--trajectory", mixed.id, "--tokenizer", str(nano.directory))
    for s in mixed.segments:
        assert nano.decode(s.tokens) in shown
    for version in mixed.versions:
        assert f"--- policy, version {version}, " in shown


def test_a_store_that_is_being_written_can_be_read(played):
    (file,) = park.files(played / "park")
    file.write_bytes(file.read_bytes()[:-7])
    assert "a record that is not whole" in said("show", str(played))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("group=0/sample=0", "holds no model directory to decode with"),
        ("group=99/sample=0", "'group=99/sample=0': not in the park store"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_sentence(played, name, sentence):
    with pytest.raises(UserError, match=sentence):
        runs.print_trajectory(played, name, None)


def test_a_folder_without_runs_is_said_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no run in it has a park store"):
        runs.print_runs(tmp_path)
    with pytest.raises(UserError, match="give a run directory in which RL has begun"):
        runs.print_run(tmp_path)
