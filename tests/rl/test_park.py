"""The park store: what was written comes back, whatever a crash left of the file; damage and foreign formats do not."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.rl import park
from nonet.rl.park import ParkStore, read
from nonet.types import Segment, Trajectory, UserError


@pytest.fixture
def store(tmp_path: Path) -> ParkStore:
    made_ = ParkStore(tmp_path, seed=7)
    made_.start()
    return made_


def only(folder: Path) -> Path:
    (file,) = park.files(folder)
    return file


def parked(group: int, sample: int, **over) -> Trajectory:
    box = {"tools": ["look"], "files": {"a": "fig"}}
    return made.trajectory(group, sample, status="parked", sandbox=box, harness="spec", **over)


def write_more(t: Trajectory, version: int, n: int = 2) -> None:
    values = tuple(-0.1 * i - 1 / 3 for i in range(n))
    t.append(Segment("policy", tuple(range(n)), values, values[::-1], version))


def test_what_was_written_comes_back_to_the_last_bit(store, tmp_path):
    first, second = parked(0, 0), parked(0, 1)
    store.write([second, first])
    write_more(first, 3, 5)
    first.append(Segment("tool", (9, 9), texts=("said",)))
    first.status, first.stop_reason, first.rewards = "done", "stop", {"r": 1 / 3}
    store.write([first])
    found = read(only(tmp_path))
    assert found.held == {0: [first, second]}
    assert (found.seed, found.next_group, found.torn) == (7, 1, 0)


def test_a_pause_writes_only_what_is_new(store, tmp_path):
    t = parked(0, 0)
    store.write([t])
    write_more(t, 1)  # extends the segment of version 1
    store.write([t])
    write_more(t, 2)
    store.write([t])
    records = [json.loads(line.partition(b" ")[2]) for line in only(tmp_path).read_bytes().splitlines()]
    said = [(r["seq"], r["position"], len(r["tokens"])) for r in records if r.get("kind") == "segment"]
    assert said == [(0, 0, 3), (1, 3, 4), (1, 7, 2), (2, 9, 2)]
    assert [s.policy_version for s in read(only(tmp_path)).held[0][0].segments] == [-1, 1, 2]


def test_every_segment_names_its_random_counter_and_its_harness(store, tmp_path):
    store.write([parked(4, 1, attempt=2)])
    records = [json.loads(line.partition(b" ")[2]) for line in only(tmp_path).read_bytes().splitlines()]
    segments = [r for r in records if r.get("kind") == "segment"]
    assert {(r["stream"], r["harness"]) for r in segments} == {("task 4#4/1/2", "spec")}
    assert [r["position"] for r in segments] == [0, 3]
    assert records[0]["seed"] == 7


@given(data=st.data())
def test_any_schedule_replays_to_the_pool(tmp_path_factory, data):
    """Pauses, growth, restarts, releases, compactions, and a mark to go back to, in any order."""
    folder = tmp_path_factory.mktemp("park")
    store = ParkStore(folder, 0, compact_above=400)
    store.start()
    held: dict[int, list[Trajectory]] = {}
    drawn, marks = 0, []
    for version in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 2))):
            held[drawn] = [Trajectory(f"task {drawn}", drawn, s) for s in range(2)]
            drawn += 1
        active = [t for members in held.values() for t in members if data.draw(st.booleans()) or not t.segments]
        for t in active:
            if t.segments and data.draw(st.integers(0, 3)) == 0:
                t.restart()
            if not t.segments:
                t.append(Segment("prompt", (1, 2)))
            write_more(t, version // 2, data.draw(st.integers(1, 3)))
            t.status = data.draw(st.sampled_from(["parked", "done", "failed"]))
        store.write(active)
        if held and data.draw(st.booleans()):
            store.release([gone := data.draw(st.sampled_from(sorted(held)))], "trained")
            del held[gone]
        marks.append((store.mark(drawn, held), copy.deepcopy(held), drawn))
        assert read(folder / marks[-1][0]["file"]).held == held
    mark, then, next_group = marks[-1]
    store.write([Trajectory("after", drawn, 0)])
    again = ParkStore(folder, 0, compact_above=400)
    found = again.resume(mark)
    assert (found.held, found.next_group) == (then, next_group)
    assert found.undone > 0
    for members in then.values():
        write_more(members[0], 99)
        again.write(members)
    assert read(only(folder)).held == then


def test_what_lies_beyond_the_mark_is_cut_off(store, tmp_path):
    store.write([parked(0, 0)])
    mark = store.mark(1, {})
    store.write([parked(1, 0)])
    again = ParkStore(tmp_path, 7)
    found = again.resume(mark)
    assert (list(found.held), found.next_group) == ([0], 1)
    assert only(tmp_path).stat().st_size == mark["offset"]


@pytest.mark.parametrize("cut", [1, 2, 9, 60])
def test_a_torn_last_record_is_left_out_and_counted(store, tmp_path, cut):
    store.write([parked(0, 0)])
    whole = only(tmp_path).read_bytes()
    store.write([t := parked(0, 1)])
    both = only(tmp_path).read_bytes()
    only(tmp_path).write_bytes(both[:-cut])
    found = read(only(tmp_path))
    assert found.torn > 0
    assert [m.sample for m in found.held[0]] == [0, 1]
    assert found.held[0][1].segments == t.segments
    assert found.held[0][1].status == "new"  # its state record is the torn one
    only(tmp_path).write_bytes(whole[:-1] + b"?")  # the newline was never written
    assert read(only(tmp_path)).torn > 0


def test_damage_before_the_end_is_refused_with_the_line(store, tmp_path):
    store.write([parked(0, 0)])
    data = only(tmp_path).read_bytes()
    only(tmp_path).write_bytes(data.replace(b'"author":"policy"', b'"author":"prompt"'))
    with pytest.raises(UserError, match="line 3 is damaged, and others follow it"):
        read(only(tmp_path))


def test_another_format_is_refused_in_one_sentence(store, tmp_path):
    only(tmp_path).write_bytes(park._line({"format": "nonet-park", "version": 2, "seed": 0, "next_group": 0}))
    with pytest.raises(UserError, match=r"version 2; this Nonet reads 'nonet-park', version 1: use the Nonet that"):
        read(only(tmp_path))
    only(tmp_path).write_bytes(b'{"other": 1}\n')
    with pytest.raises(UserError, match="format None"):
        read(only(tmp_path))


def test_a_store_shorter_than_its_mark_is_refused(store, tmp_path):
    store.write([parked(0, 0)])
    mark = store.mark(1, {})
    only(tmp_path).write_bytes(only(tmp_path).read_bytes()[:-5])
    with pytest.raises(UserError, match=f"but the checkpoint needs {mark['offset']}; restore the file"):
        ParkStore(tmp_path, 7).resume(mark)


def test_compaction_keeps_what_is_held_and_the_old_file_until_a_checkpoint_names_the_new(tmp_path):
    store = ParkStore(tmp_path, 7, compact_above=0)
    store.start()
    store.write([parked(g, 0) for g in range(4)])
    before = store.mark(4, {})
    store.release([0, 1, 3], "trained")
    held = {2: [parked(2, 0)]}
    mark = store.mark(4, held)
    assert [f.name for f in park.files(tmp_path)] == [before["file"], mark["file"]]
    assert read(tmp_path / mark["file"]).held == held
    assert read(tmp_path / mark["file"]).next_group == 4
    assert ParkStore(tmp_path, 7).resume(before).next_group == 4  # killed before the checkpoint: the old file counts
    assert [f.name for f in park.files(tmp_path)] == [before["file"]]
