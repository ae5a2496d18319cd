"""Budgets: thinking is counted from ids, to the token; a measurement is made once and says the same again."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nonet.rl import RLConfig
from nonet.rl.budgets import BudgetConfig, Budgets, Measured, kind, measured, problem, thinking_tokens
from nonet.types import Segment, Trajectory, UserError

WORDS = ("<think>", "</think>", "ab", "7", " ", "é", "<", ">")
RL = RLConfig(max_tokens=24)
SMALL = dict(tasks=6, samples=2, effort="low")


def attempt(*parts: tuple[str, list[int]]) -> Trajectory:
    """Each part under its own policy version."""
    t = Trajectory("general.reverse/train/0", 0, 0, [Segment("prompt", (1, 2))])
    for version, (author, ids) in enumerate(parts):
        zeros = (0.0,) * len(ids) if author == "policy" else ()
        t.segments.append(Segment(author, tuple(ids), zeros, zeros, version))  # type: ignore[arg-type]
    return t


def counted(nano, *parts: tuple[str, list[int]]) -> int:
    return thinking_tokens(attempt(*parts), tiny.setting(nano).spec, nano)


@given(st.lists(st.sampled_from(range(len(WORDS))), max_size=12), st.lists(st.integers(0, 40), max_size=4))
def test_thinking_is_what_lies_between_the_marks_wherever_pauses_fall(nano, words, cuts):
    """Against a walk over ids, with the marks as the single tokens they are here."""
    opened, closed = (nano.encode(mark)[0] for mark in ("<think>", "</think>"))
    ids = [i for w in words for i in ((opened, closed)[w : w + 1] if w < 2 else nano.encode(WORDS[w]))]
    inside, expected = False, 0
    for i in ids:
        if inside and i != closed:
            expected += 1
        inside = i != closed if inside else i == opened
    ends = sorted({min(c, len(ids)) for c in cuts} | {0, len(ids)})
    pieces = [("policy", ids[a:b]) for a, b in pairwise(ends)]
    assert counted(nano, *pieces) == expected


def test_a_mark_spelled_letter_by_letter_is_a_mark(nano):
    spelled = [i for c in "<think>abc</think>7" for i in nano.encode(c)]
    assert counted(nano, ("policy", spelled)) == 3


def test_every_token_of_a_split_character_counts(nano):
    assert len(nano.encode("é")) == 2
    assert counted(nano, ("policy", nano.encode("<think>é</think>é"))) == 2


def test_an_open_thought_lasts_to_the_end_of_its_turn_and_no_further(nano):
    thought = nano.encode("<think>ab7")
    size = len(thought) - 1
    assert counted(nano, ("policy", thought)) == size
    assert counted(nano, ("policy", [*thought, nano.turn_end])) == size
    assert counted(nano, ("policy", thought), ("tool", [5, 6]), ("policy", nano.encode("ab7"))) == size


def test_a_mark_in_a_calls_arguments_is_text(nano):
    ids = nano.encode('<call>{"name": "write_file", "arguments": {"content": "<think>ab</think>"}}</call>')
    assert counted(nano, ("policy", ids)) == 0


def test_tools_and_prompts_do_not_think(nano):
    thought = nano.encode("<think>ab</think>")
    t = attempt(("policy", nano.encode("7")), ("tool", thought), ("policy", nano.encode("7")))
    t.segments[0] = Segment("prompt", tuple(thought))
    assert thinking_tokens(t, tiny.setting(nano).spec, nano) == 0


def test_what_is_counted_is_said_by_domain(nano):
    setting = tiny.setting(nano)
    t = attempt(("policy", nano.encode("<think>ab</think>7")))
    errand, word = (setting.task("train", i) for i in (0, 1))
    assert (errand.domain, word.domain) == ("agents", "general")
    config = BudgetConfig()
    assert config.spent(t, errand, setting) == t.policy_tokens
    assert config.spent(t, word, setting) == thinking_tokens(t, setting.spec, nano) < t.policy_tokens
    everything = BudgetConfig(counts={})
    assert everything.spent(t, word, setting) == t.policy_tokens


# ------------------------------------------------------------------- budgets

ATTEMPTS = [
    Measured("general.add/train/0", 4, 1.0), Measured("general.add/train/0", 8, 0.0),
    Measured("general.add/train/1", 6, 1.0), Measured("general.add/train/1", 2, 1.0),
    Measured("coding.arith/train/0", 30, 0.0),
]  # fmt: skip


def task(source: str, index: int):
    from nonet.tasks import load

    return load(source).task("train", index)


def test_a_budget_is_the_mean_over_the_kind_or_the_task():
    by_kind, by_task = Budgets(ATTEMPTS), Budgets(ATTEMPTS, "task")
    assert by_kind.mean(task("general.add", 1)) == 5.0
    assert by_task.mean(task("general.add", 1)) == 4.0
    assert by_task.mean(task("general.add", 9)) == 5.0, "a task that was not measured has its kind's"
    assert by_kind.mean(task("coding.arith", 3)) == 30.0


def test_toggles_budget_is_a_percentile_of_the_correct():
    budgets, add = Budgets(ATTEMPTS), task("general.add", 0)
    assert [budgets.percentile(add, share, 1.0) for share in (0.3, 1 / 3, 0.5, 0.9, 1.0)] == [2, 2, 4, 6, 6]
    assert budgets.percentile(task("coding.arith", 0), 0.5, 1.0) == math.inf


def test_an_unmeasured_kind_is_the_users_mistake():
    with pytest.raises(UserError, match=r"raise effort\.budget\.tasks"):
        Budgets(ATTEMPTS).mean(task("general.sort", 0))


def test_names_of_tasks_tell_kind_and_problem():
    assert kind("gym:chain_sum?size=9/train/17") == "gym:chain_sum?size=9"
    assert problem("mine.jsonl/train/a/b@3") == "mine.jsonl/train/a/b"
    assert kind(problem("mine.jsonl/train/a/b@3")) == "mine.jsonl"


def test_a_measurement_is_made_once_and_says_the_same_again(policy, nano, tmp_path, monkeypatch):
    setting, config = tiny.setting(nano), BudgetConfig.model_validate(SMALL)
    first = measured(policy, setting, config, RL, tmp_path / "budgets.json")
    text = (tmp_path / "budgets.json").read_text()
    assert len(first.attempts) == 12
    assert {kind(a.task) for a in first.attempts} == {"agents.move", "general.reverse"}
    assert measured(policy, setting, config, RL, tmp_path / "again.json").attempts == first.attempts
    assert (tmp_path / "again.json").read_text() == text
    monkeypatch.setattr("nonet.rl.budgets.evaluate", None)  # calling it again would be an error
    assert measured(policy, setting, config, RL, tmp_path / "budgets.json").attempts == first.attempts


def test_a_measurement_is_of_what_was_played(policy, nano, tmp_path):
    """T of agents is every policy token, and the level asked for is the one played."""
    config = BudgetConfig.model_validate({**SMALL, "tasks": 1, "samples": 3})
    setting = tiny.setting(nano, efforts=("max",), rewards={"varied": tiny.varied})
    seen = []

    def watch(model, at, *rest):
        seen.extend(played := evaluate(model, at, *rest))
        assert at.efforts == ("low",)
        return played

    from nonet.rl.evaluate import evaluate

    with pytest.MonkeyPatch.context() as m:
        m.setattr("nonet.rl.budgets.evaluate", watch)
        budgets = measured(policy, setting, config, RL, tmp_path / "budgets.json")
    assert [(a.tokens, a.reward) for a in budgets.attempts] == [(t.policy_tokens, t.reward) for t in seen]


def test_other_settings_do_not_read_an_old_measurement(policy, nano, tmp_path):
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps({"config": BudgetConfig(tasks=9).model_dump(mode="json"), "attempts": []}))
    with pytest.raises(UserError, match="other settings"):
        measured(policy, tiny.setting(nano), BudgetConfig.model_validate(SMALL), RL, file)


def test_the_level_of_measurement_must_be_one():
    with pytest.raises(ValidationError, match="'huge' is not an effort"):
        BudgetConfig(effort="huge")
