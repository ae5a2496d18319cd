"""A run directory survives being killed: whole checkpoints, whole lines, one configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nonet.run import Run, write_atomic
from nonet.types import UserError


def test_events_come_back_in_order_and_by_kind(tmp_path):
    run = Run(tmp_path / "deep" / "run")
    run.event("a", x=1)
    run.event("b", y="zwei\nZeilen ü")
    run.event("a", x=2)
    assert [e["x"] for e in run.events("a")] == [1, 2]
    assert [e["kind"] for e in run.events()] == ["a", "b", "a"]
    assert next(run.events("b"))["y"] == "zwei\nZeilen ü"
    assert list(Run(tmp_path / "empty").events()) == []


@pytest.mark.parametrize(
    "torn", [b'{"t": 1.0, "ki', b"{", '{"kind": "ü'.encode()[:-1], b'{"t": 1.0, "kind": "a", "x": 3}']
)
def test_a_torn_last_line_is_cut_off_at_the_next_start(tmp_path, torn):
    run = Run(tmp_path)
    run.event("a", x=1)
    with (tmp_path / "events.jsonl").open("ab") as f:
        f.write(torn)
    again = Run(tmp_path)
    again.event("a", x=2)
    assert [e["x"] for e in again.events()] == [1, 2]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"t"')
    assert list(Run(tmp_path).events()) == []


def test_rewind_drops_what_a_crash_undid_and_nothing_else(tmp_path):
    run = Run(tmp_path)
    for step in range(5):
        run.event("step", step=step)
        run.event("other", step=step)
    run.rewind(lambda e: e["kind"] != "step" or e["step"] <= 2)
    assert [e["step"] for e in run.events("step")] == [0, 1, 2]
    assert [e["step"] for e in run.events("other")] == list(range(5))


def test_changed_settings_are_refused_naming_each_difference(tmp_path):
    Run(tmp_path, {"rl": {"lr": 1e-4, "groups": 8}, "seed": 0})
    Run(tmp_path, {"seed": 0, "rl": {"groups": 8, "lr": 1e-4}})  # the same, in another order
    with pytest.raises(UserError) as caught:
        Run(tmp_path, {"rl": {"lr": 2e-4, "groups": 8}, "seed": 1})
    for part in ("rl.lr: 0.0001 -> 0.0002", "seed: 0 -> 1", "--out"):
        assert part in str(caught.value)
    assert "groups" not in str(caught.value)
    assert json.loads((tmp_path / "resolved.json").read_text())["seed"] == 0


def test_reading_a_run_asks_for_no_settings(tmp_path):
    Run(tmp_path, {"seed": 3})
    Run(tmp_path)
    assert json.loads((tmp_path / "resolved.json").read_text()) == {"seed": 3}


# --------------------------------------------------------------------- checkpoints


def fill(text: str):
    def write(folder: Path) -> None:
        (folder / "a").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text(text * 2)

    return write


def fail_half_way(folder: Path) -> None:
    (folder / "a").write_text("half")
    raise KeyboardInterrupt


def test_a_checkpoint_is_whole_or_absent(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.save("rl-1", fail_half_way)
    assert run.checkpoints("rl") == []
    run.save("rl-1", fill("one"))
    (found,) = run.checkpoints("rl")
    assert (found / "a").read_text() == "one"
    assert (found / "sub" / "b").read_text() == "oneone"


def test_a_crash_while_saving_again_leaves_the_old_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.save("rl-1", fill("old"))
    with pytest.raises(KeyboardInterrupt):
        run.save("rl-1", fail_half_way)
    assert (run.checkpoints("rl")[0] / "a").read_text() == "old"
    run.save("rl-1", fill("new"))
    assert [(p.name, (p / "a").read_text()) for p in run.checkpoints("rl")] == [("rl-1", "new")]


@pytest.mark.parametrize("moment", [0, 1])
def test_a_crash_at_the_very_swap_of_an_equal_name_still_leaves_one_of_the_two(tmp_path, monkeypatch, moment):
    """Saving NAME over NAME must not pass through a moment after which no checkpoint is found."""
    run = Run(tmp_path)
    run.save("rl-1", fill("old"))

    rename, moments = Path.rename, iter(range(9))

    def die(self: Path, target: Path) -> None:
        if next(moments) == moment:
            raise KeyboardInterrupt
        rename(self, target)

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        run.save("rl-1", fill("new"))
    monkeypatch.undo()
    (found,) = Run(tmp_path).checkpoints("rl")
    assert (found / "a").read_text() in ("old", "new")


def test_checkpoints_are_sorted_by_number_and_by_prefix(tmp_path):
    run = Run(tmp_path)
    for name in ("rl-10", "rl-9", "cold-3", "rl-100", "rl-cold-5"):
        run.save(name, fill(name))
    assert [p.name for p in run.checkpoints("rl")] == ["rl-9", "rl-10", "rl-100"]
    assert [p.name for p in run.checkpoints("cold")] == ["cold-3"]
    run.prune("rl", keep=1)
    assert [p.name for p in run.checkpoints("rl")] == ["rl-100"]
    assert [p.name for p in run.checkpoints("rl-cold")] == ["rl-cold-5"]


def test_write_atomic_leaves_the_old_text_when_it_fails(tmp_path):
    file = tmp_path / "x.json"
    write_atomic(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "new \ud800")
    assert file.read_text() == "old"
    write_atomic(file, "newer")
    assert file.read_text() == "newer"


def test_trajectories_are_replaced_not_appended(tmp_path):
    run = Run(tmp_path)
    run.write_trajectories("step-000001", [{"id": 1}, {"id": 2}])
    run.write_trajectories("step-000001", [{"id": 3}])
    lines = (tmp_path / "trajectories" / "step-000001.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [3]
