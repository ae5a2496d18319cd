"""reasoning-gym through our eyes: every dataset, its own scorer, and scorers that would run the answer as code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("reasoning_gym", reason="install nonet[tasks]")

from nonet.tasks import gym, load, load_reward
from nonet.types import Message, Task, UserError

# Datasets that cannot be a source by name alone, and the reason our error gives.
REFUSED = {
    "composite": "write gym:A,gym:B",
    "game_of_life_halting": "gives full marks to any text",
}
PROBED = ("prime_factorization", "knights_knaves", "sudoku", "dice", "word_ladder")
TASKS = {name: load(f"gym:{name}").task("train", 0) for name in PROBED}
SILENT = {"boxnet", "rush_hour"}  # state no answer, so there is nothing to demonstrate


def scored(task: Task, text: str) -> float:
    return load_reward("gym")(task, [*task.prompt, Message.assistant(text)], None)


@pytest.mark.parametrize("dataset", gym.names())
def test_every_dataset_works_through_its_own_scorer(dataset: str):
    if dataset in REFUSED:
        with pytest.raises(UserError, match=REFUSED[dataset]):
            load(f"gym:{dataset}")
        return
    source = load(f"gym:{dataset}")
    task = source.task("train", 0, "low")
    assert (task.rewards, task.domain, task.effort) == (("gym",), "general", "low")
    turns = source.demonstrate(task)
    assert (turns is None) == (dataset in SILENT), turns
    if turns is not None:
        assert load_reward("gym")(task, [*task.prompt, *turns], None) == 1.0
    for text in ("", "()", "\0 \ud800 ½", "x" * 5000, task.prompt[0].text):
        assert 0.0 <= scored(task, text) < 1.0


def test_a_task_is_a_function_of_its_arguments_and_splits_are_disjoint():
    source, again = load("gym:gcd", seed=1), load("gym:gcd", seed=1)
    train = [source.task("train", i) for i in range(60)]
    held = [source.task("heldout", i) for i in range(60)]
    assert [again.task("train", i) for i in range(60)] == train
    assert not {t.prompt for t in train} & {t.prompt for t in held}
    assert load("gym:gcd", seed=2).task("train", 0) != train[0]


def test_datasets_built_as_a_whole_take_any_index():
    """gsm_symbolic knows `size` problems; indices beyond it come round again."""
    source = load("gym:gsm_symbolic?size=20")
    loaded = gym.load_dataset("gsm_symbolic", json.dumps(dict(source.settings)))
    known = {loaded[i]["question"] for i in range(20)}
    assert {source.task("train", i).prompt[0].text for i in range(60)} <= known


def test_settings_reach_the_dataset():
    task = load("gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1").task("train", 0)
    assert task.data["entry"]["metadata"]["num_terms"] == 2
    mixed = load("gym:chain_sum?min_terms=2,gym:gcd,general.add")
    assert [mixed.task("train", i).id.split("/")[0] for i in range(3)] == [
        "gym:chain_sum?min_terms=2",
        "gym:gcd",
        "general.add",
    ]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("gym:chainsum", "did you mean gym:chain_sum"),
        ("gym:chain_sum?terms=2", "terms: unknown setting; did you mean"),
        ("gym:chain_sum?min_terms", "write settings as"),
        ("gym:chain_sum?min_terms=9&max_terms=2", "settings"),
        ("gym:chain_sum?min_terms=many", "settings"),
    ],
)
def test_a_wrong_spec_says_what_to_write(spec: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        load(spec)


@pytest.mark.parametrize("dataset", ["n_queens", "countdown", "string_insertion"])
def test_an_answer_is_never_run_as_code_in_this_process(dataset: str, tmp_path: Path):
    task = load(f"gym:{dataset}").task("train", 0)
    victim = tmp_path / "victim"
    for text in (
        f"__import__('pathlib').Path({str(victim)!r}).touch()",
        f"open({str(victim)!r}, 'w')",
        "[setattr(__import__('sys'), 'was_here', 1)]",
        "9**9**9**9",
    ):
        gym.TIMEOUT_S, kept = 0.5, gym.TIMEOUT_S
        try:
            assert scored(task, text) < 1.0
        finally:
            gym.TIMEOUT_S = kept
    assert not victim.exists()
    assert not hasattr(sys, "was_here")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.sampled_from(PROBED))
def test_no_answer_upsets_a_scorer(text: str, dataset: str):
    assert 0.0 <= scored(TASKS[dataset], text) <= 1.0


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"install nonet\[tasks\]"):
        load("gym:some_dataset_not_yet_cached")
