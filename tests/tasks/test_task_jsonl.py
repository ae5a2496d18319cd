"""Tasks from JSONL: every field, and for every mistake the place and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attempts import play_turns  # type: ignore[import-not-found]

from nonet.tasks import load
from nonet.types import Message, Task, ToolCall, UserError


def source(tmp_path: Path, *lines: object):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return load(str(file))


def one(tmp_path: Path, **fields: object) -> Task:
    return source(tmp_path, {"prompt": "?", "split": "train", **fields}).task("train", 0)


def test_a_question_with_an_answer(tmp_path: Path):
    task = one(tmp_path, answer=7, id="q", demonstration="7", domain="agents")
    assert task.id == "mine/train/q"
    assert (task.rewards, task.domain, task.sandbox) == (("exact",), "agents", None)
    assert play_turns(task, [Message.assistant("7.0")])[0] == 1.0
    turns = load(str(tmp_path / "mine.jsonl")).demonstrate(task)
    assert turns == [Message.assistant("7")]


def test_messages_keep_their_roles(tmp_path: Path):
    said = [("system", "be brief"), ("user", "hi"), ("assistant", "yes?"), ("user", "2+2")]
    messages = [{"role": role, "content": content} for role, content in said]
    task = source(tmp_path, {"messages": messages, "answer": "4", "split": "train"}).task("train", 0)
    assert [(m.role, m.text) for m in task.prompt] == said


def test_an_errand_on_files(tmp_path: Path):
    task = one(tmp_path, files={"a": "1"}, expect_files={"b": "1"}, absent=["a"], tools=["move_file"])
    assert task.rewards == ("files",)
    assert task.sandbox is not None
    assert task.sandbox.tools == ("move_file",)
    move = Message.assistant(calls=(ToolCall("move_file", {"source": "a", "target": "b"}),))
    assert play_turns(task, [move])[0] == 1.0
    assert play_turns(task, [])[0] == 0.0
    plain = one(tmp_path, files={"a": "1"}, reward="exact", answer="1")
    assert plain.sandbox is not None
    assert plain.sandbox.tools == ("list_files", "read_file", "write_file")


def test_a_function_with_tests(tmp_path: Path):
    task = one(tmp_path, function="add", tests=[[[1, 2], 3], [[0, 0], 0]])
    assert task.rewards == ("python_tests",)
    assert play_turns(task, [Message.assistant("def add(a, b): return a + b")])[0] == 1.0
    assert play_turns(task, [Message.assistant("def add(a, b): return 3")])[0] == 0.0


def test_rewards_by_name_and_none_at_all(tmp_path: Path):
    assert one(tmp_path, reward=["exact", "my_pkg:my_reward"], answer="1").rewards == ("exact", "my_pkg:my_reward")
    assert one(tmp_path).rewards == ()  # for `--reward`, or for prompts that need no score
    assert one(tmp_path, data={"hint": 1}).data == {"hint": 1}


def test_splits_by_statement_or_by_word_and_repetitions(tmp_path: Path):
    mine = source(tmp_path, *({"prompt": f"say {i}", "answer": i} for i in range(40)))
    for split in ("train", "heldout"):
        first = [mine.task(split, i) for i in range(60)]
        count = next(i for i in range(1, 60) if first[i].prompt == first[0].prompt)
        assert first[count].id == f"{first[0].id}@1"
        assert len({task.id for task in first}) == 60
        assert {task.prompt for task in first[:count]} == {task.prompt for task in first}
    held = source(tmp_path, {"prompt": "a", "split": "heldout"}, "", {"prompt": "b", "split": "train"})
    assert held.task("heldout", 0).id == "mine/heldout/1"
    assert held.task("train", 0).id == "mine/train/3"


def test_the_effort_is_the_callers_unless_the_line_insists(tmp_path: Path):
    mine = source(tmp_path, {"prompt": "a", "split": "train"}, {"prompt": "b", "split": "train", "effort": "low"})
    assert [mine.task("train", i, "high").effort for i in (0, 1)] == ["high", "low"]


def test_a_missing_split_says_how_to_mark_one(tmp_path: Path):
    mine = source(tmp_path, {"prompt": "a", "split": "train"})
    with pytest.raises(UserError, match='none of its 1 is heldout; mark one with "split": "heldout"'):
        mine.task("heldout", 0)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "not JSON .* write one object a line"),
        ("3", "must be an object"),
        ({}, "give either prompt .* or messages"),
        ({"prompt": "?", "messages": []}, "give either prompt .* or messages"),
        ({"prompt": 3}, "prompt = 3: must be text"),
        ({"prompt": "?", "anwser": "4"}, "anwser: unknown field; did you mean answer"),
        ({"prompt": "?", "answer": True}, "answer = True: must be text or a number"),
        ({"prompt": "?", "split": "test"}, "split = 'test': must be one of train, heldout"),
        ({"prompt": "?", "effort": "huge"}, "effort = 'huge': must be one of low, high, max"),
        ({"prompt": "?", "reward": "exakt"}, "reward 'exakt': must be one of exact, files"),
        ({"prompt": "?", "reward": [1]}, "reward 1: must be one of"),
        ({"prompt": "?", "tools": ["read"]}, "did you mean 'read_file'"),
        ({"prompt": "?", "files": {"a": 1}}, "files.a = 1: must be text"),
        ({"prompt": "?", "files": {"../a": ""}}, "'..' is not allowed"),
        ({"prompt": "?", "files": {"a": "1"}, "expect_files": {"a": "1"}}, "expect_files: already true"),
        ({"prompt": "?", "expect_files": {}}, "expect_files: already true"),
        ({"prompt": "?", "tests": [[1, 2]]}, r"tests\[0\] = \[1, 2\]: write \[arguments, expected\]"),
        ({"prompt": "?", "tests": []}, "tests: holds no test"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\]: write"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last one must be the user's"),
        ({"prompt": "?", "reward": "exact"}, "reward 'exact' needs answer"),
        ({"prompt": "?", "reward": "python_tests"}, "reward 'python_tests' needs tests"),
        ({"prompt": "?", "reward": "files"}, "reward 'files' needs expect_files"),
        ({"prompt": "?", "answer": " "}, "answer: is empty"),
    ],
)
def test_a_mistake_names_the_line_the_field_and_the_fix(tmp_path: Path, line: object, sentence: str):
    with pytest.raises(UserError, match=f"^{tmp_path}/mine.jsonl:2: .*{sentence}"):
        source(tmp_path, {"prompt": "fine", "answer": "1"}, line)


def test_twins_are_found(tmp_path: Path):
    with pytest.raises(UserError, match=r"mine.jsonl:2: id 'q' is taken by .*mine.jsonl:1"):
        source(tmp_path, {"prompt": "a", "id": "q"}, {"prompt": "b", "id": "q"})
    with pytest.raises(UserError, match=r"mine.jsonl:2: split: the same problem is in train"):
        source(tmp_path, {"prompt": "a", "split": "train"}, {"prompt": "a ", "split": "heldout"})


def test_a_file_without_tasks_or_in_another_encoding(tmp_path: Path):
    with pytest.raises(UserError, match="holds no task"):
        source(tmp_path, "", " ")
    (tmp_path / "mine.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="save it as UTF-8"):
        load(str(tmp_path / "mine.jsonl"))
