"""`load`: every form of spec, mixtures, and what a wrong name says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nonet.tasks import Mixture, load
from nonet.types import Message, Task, UserError


def test_a_domain_is_a_mixture_of_its_kinds_in_turn():
    source = load("general")
    assert isinstance(source, Mixture)
    assert source.domain == "general"
    ids = [source.task("train", i).id for i in range(7)]
    assert ids[0] == "general.add/train/0"
    assert ids[5:] == ["general.add/train/1", "general.multiply/train/1"]
    assert len({source.task("heldout", i).id for i in range(50)}) == 50


def test_a_mixture_of_domains_demonstrates_each_of_its_tasks():
    source = load("general, agents.move ,coding.compose")
    assert source.domain == "mixed"
    for index in range(12):
        task = source.task("train", index)
        assert source.demonstrate(task)
    assert {source.task("train", i).domain for i in range(3)} == {"general", "agents", "coding"}


def test_a_mixture_does_not_answer_for_a_strange_task():
    with pytest.raises(UserError, match=r"comes from none of general\.add"):
        load("general").demonstrate(Task("elsewhere/train/0", (Message.user("?"),)))


def test_seed_and_difficulty_reach_every_member():
    assert load("general", seed=1).task("train", 0) != load("general").task("train", 0)
    hard = load("general", difficulty=3).task("train", 0)
    assert len(hard.prompt[0].text) > len(load("general").task("train", 0).prompt[0].text)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("general.ad", "did you mean 'general.add'"),
        ("agent", "did you mean 'agents'"),
        ("", "is empty"),
        (" , ", "is empty"),
        ("general,general.add", "names 'general.add' twice"),
        ("missing.jsonl", "missing.jsonl: no such file"),
        ("no_such_module_here:tasks", "no module 'no_such_module_here'"),
        ("nonet.tasks:laod", "did you mean 'load'"),
        (":x", "write it as pkg.module:attribute"),
        ("nonet.types:EFFORTS", r"EFFORTS\[0\]: must be an object"),
        ("nonet.types:Task", "missing"),
    ],
)
def test_a_wrong_spec_says_what_to_write(spec: str, sentence: str):
    with pytest.raises((UserError, TypeError), match=sentence):
        load(spec)


def test_difficulty_out_of_range():
    with pytest.raises(UserError, match="difficulty 4 for general"):
        load("general", difficulty=4)


# --------------------------------------------------------------- your own


@pytest.fixture
def module(tmp_path: Path, monkeypatch):
    """Write `mine.py` into the working directory, as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> None:
        sys.modules.pop("mine", None)
        (tmp_path / "mine.py").write_text(text)

    yield write
    sys.modules.pop("mine", None)


def test_a_list_of_dicts(module):
    module('tasks = [{"prompt": f"say {i}", "answer": i} for i in range(20)]')
    source = load("mine:tasks")
    assert source.name == "tasks"
    train = source.task("train", 0, "low")
    assert (train.rewards, train.effort, train.domain) == (("exact",), "low", "general")


def test_a_function_that_makes_a_list_of_tasks(module):
    module(
        "from nonet.types import *\n"
        "def make(seed):\n    return [Task(str(i), (Message.user(f'{seed} {i}'),), 'agents') for i in range(20)]"
    )
    source = load("mine:make", seed=7)
    task = source.task("heldout", 0)
    assert task.prompt[0].text.startswith("7 ")
    assert task.id == f"make/heldout/{task.prompt[0].text.split()[1]}"
    assert source.domain == "agents"


def test_a_source_class_is_made_with_seed_and_difficulty(module):
    module(
        "from nonet.tasks import Generated, Problem\n"
        "from nonet.types import Message\n"
        "class Echo(Generated):\n"
        "    name, domain, about = 'echo', 'general', 'say it'\n"
        "    def draw(self, rng):\n"
        "        word = str(rng.random())[:4 + self.difficulty]\n"
        "        return Problem(f'say {word}', {'answer': word})\n"
        "    def demonstrate(self, task):\n"
        "        return [Message.assistant(task.data['answer'])]\n"
    )
    source = load("mine:Echo", seed=1, difficulty=2)
    assert len(source.task("train", 0).data["answer"]) == 6
    both = load("mine:Echo,general.add")
    assert both.task("train", 0).id == "echo/train/0"


def test_an_import_error_inside_the_users_module_is_shown_as_it_is(module):
    module("import a_package_that_is_not_installed")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        load("mine:tasks")


def test_something_else_is_refused_with_what_it_lacks(module):
    module("tasks = 3")
    with pytest.raises(UserError, match=r"gives a int, which is neither .* \(it has no name, domain, task"):
        load("mine:tasks")
