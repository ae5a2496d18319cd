"""Every built-in source: pure, split, varied, short, solved by its demonstrations, and by nothing less."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from attempts import errors, play_turns  # type: ignore[import-not-found]

from nonet.harness import load_spec, render_assistant
from nonet.tasks import list_sources, load, split_of
from nonet.tasks.catalog import BUILT_IN
from nonet.tasks.source import SPLITS, statement_of
from nonet.types import EFFORTS, Message, Task, ToolCall, UserError

NAMES = list(BUILT_IN)
GENERAL = [name for name in NAMES if name.startswith("general.")]
AGENTS = [name for name in NAMES if name.startswith("agents.")]
CODING = [name for name in NAMES if name.startswith("coding.")]
every_source = pytest.mark.parametrize("name", NAMES)
every_difficulty = pytest.mark.parametrize("difficulty", [1, 2, 3])


def said(task: Task) -> str:
    return task.prompt[-1].text


def statement(task: Task) -> str:
    return statement_of(task.prompt, task.sandbox.files if task.sandbox else None)


# ------------------------------------------------------------------ drawing


@every_source
def test_a_task_is_a_function_of_its_arguments_alone(name: str):
    source, again = load(name, seed=3), load(name, seed=3)
    for split in SPLITS:
        tasks = [source.task(split, i, "high") for i in range(20)]
        assert [again.task(split, i, "high") for i in reversed(range(20))] == tasks[::-1]
        assert [t.id for t in tasks] == [f"{name}/{split}/{i}" for i in range(20)]
    assert load(name, seed=4).task("train", 0) != source.task("train", 0)


@every_source
def test_the_effort_changes_only_the_effort(name: str):
    source = load(name)
    low, high, most = (source.task("train", 5, effort) for effort in EFFORTS)
    assert (low.effort, high.effort, most.effort) == EFFORTS
    assert low.prompt == high.prompt == most.prompt
    assert low.data == high.data == most.data


@every_source
def test_splits_share_no_problem_across_seeds_and_difficulties(name: str):
    seen: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for seed in (0, 1):
        for difficulty in (1, 2):
            source = load(name, seed, difficulty)
            for split in SPLITS:
                seen[split] |= {statement(source.task(split, i)) for i in range(150)}
    assert not seen["train"] & seen["heldout"]


def test_sums_and_products_are_split_whichever_number_comes_first():
    for name in ("general.add", "general.multiply"):
        source = load(name)
        sides = {split: {tuple(sorted(said(source.task(split, i)).split())) for i in range(500)} for split in SPLITS}
        assert not sides["train"] & sides["heldout"]


@pytest.mark.parametrize("name", GENERAL + AGENTS)
def test_ten_thousand_draws_hold_five_thousand_problems(name: str):
    source = load(name)
    assert len({statement(source.task("train", i)) for i in range(10_000)}) >= 5000


@pytest.mark.parametrize("name", CODING)
def test_ten_thousand_draws_hold_thousands_of_programs(name: str):
    source = load(name)
    assert len({said(source.task("train", i)) for i in range(10_000)}) >= 2500


@every_source
def test_first_difficulty_suits_a_tiny_model(name: str):
    source = load(name)
    tasks = [source.task("train", i) for i in range(300)]
    assert max(len(said(task)) for task in tasks) < (30 if name in GENERAL else 60)
    for task in tasks:
        files = task.sandbox.files if task.sandbox else {}
        assert all(len(text) <= 20 and len(path) <= 4 for path, text in files.items())


@every_source
def test_difficulty_lengthens_the_work(name: str):
    sizes = []
    for difficulty in (1, 2, 3):
        source = load(name, difficulty=difficulty)
        tasks = [source.task("train", i) for i in range(60)]
        turns = [turn for task in tasks for turn in source.demonstrate(task) or []]
        sizes.append(sum(len(t.text) + len(t.reasoning) + len(str(t.calls)) for t in turns))
    assert sizes == sorted(sizes)
    assert sizes[2] > sizes[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(("test", 0), "split 'test'"), (("train", -1), "index -1"), (("train", 0, "huge"), "effort 'huge'")],
)
def test_a_task_that_cannot_be_named_is_a_user_error(arguments, sentence: str):
    for source in (load("general.add"), load("general")):
        with pytest.raises(UserError, match=sentence):
            source.task(*arguments)


# ------------------------------------------------------------ demonstrations


@every_source
@every_difficulty
@pytest.mark.parametrize("split", SPLITS)
def test_every_demonstration_scores_one(name: str, difficulty: int, split):
    source = load(name, difficulty=difficulty)
    for index in range(50):
        answers: set[str] = set()
        for effort in EFFORTS:
            task = source.task(split, index, effort)
            turns = source.demonstrate(task) or []
            if name in CODING and turns[-1].text in answers:
                continue  # the same program as at another effort, which has run
            answers.add(turns[-1].text)
            score, transcript, _ = play_turns(task, turns)
            assert score == 1.0, (task, turns)
            assert not errors(transcript)


def thoughts(turns: list[Message]) -> str:
    return " ".join(turn.reasoning for turn in turns if turn.reasoning)


@every_source
@every_difficulty
def test_each_effort_writes_more_than_the_one_below_at_every_single_task(name: str, difficulty: int):
    source, spec = load(name, difficulty=difficulty), load_spec("terse")
    for index in range(60):
        written: list[int] = []
        for effort in EFFORTS:
            turns = source.demonstrate(source.task("train", index, effort)) or []
            written.append(sum(len(render_assistant(turn, spec)) for turn in turns))
            assert bool(thoughts(turns)) == (effort != "low")
        assert written == sorted(set(written)), (written, index)


@pytest.mark.parametrize("name", AGENTS)
def test_high_effort_acts_as_low_does_and_thinks_once(name: str):
    source = load(name)
    for index in range(40):
        low, high = (source.demonstrate(source.task("train", index, effort)) or [] for effort in ("low", "high"))
        assert [turn.calls for turn in low] == [turn.calls for turn in high]
        assert sum(bool(turn.reasoning) for turn in high) == 1


def high(name: str, index: int, difficulty: int = 1) -> tuple[Task, str]:
    source = load(name, difficulty=difficulty)
    task = source.task("train", index, "high")
    return task, thoughts(source.demonstrate(task) or [])


def columns(total: str, addends: list[str]) -> list[int]:
    """Column sums with the carries that come in, lowest first."""
    out, carry = list[int](), 0
    for i in range(1, max(map(len, addends)) + 1):
        out.append(carry + sum(int(a[-i]) for a in addends if len(a) >= i))
        carry = out[-1] // 10
    assert "".join(str(c % 10) for c in reversed(out)).lstrip("0") in total
    return out


every_index = pytest.mark.parametrize("index", range(30))


@every_index
def test_the_middle_level_writes_the_values_that_its_answer_follows_from(index: int):
    """Each worked out here from the prompt alone."""
    task, thought = high("general.add", index)
    _, a, b = said(task).split()
    assert [int(n) for n in thought.split()] == columns(task.data["answer"], [a, b])

    task, thought = high("general.multiply", index)
    a, b = sorted(map(int, said(task).split()[1:]), reverse=True)
    assert [int(n) for n in thought.split()] == columns(task.data["answer"], [str(a)] * b)

    task, thought = high("general.reverse", index)
    first, second = thought.split()
    assert (first[::-1] + second[::-1], second + first) == (said(task).split()[1], task.data["answer"])

    task, thought = high("general.sort", index)
    first, second = thought.split()
    assert list(first) == sorted(first) and list(second) == sorted(second)
    assert sorted(first + second) == sorted(said(task).split()[1])

    task, thought = high("general.count", index)
    assert thought.replace("none", "") == said(task).split()[1] * int(task.data["answer"])


@every_index
def test_the_middle_level_of_an_errand_writes_down_what_decides_it(index: int):
    task, thought = high("agents.find", index)
    assert task.sandbox is not None
    assert said(task).split()[4] in task.sandbox.files[thought.removeprefix("in ")].split()

    task, thought = high("agents.move", index, 2)
    assert task.sandbox is not None
    names = {name: text for name, text in task.sandbox.files.items()}
    for step in thought.split(", "):
        source, target = step.split()
        names[target] = names.pop(source)
    assert names == task.data["files"]

    task, thought = high("agents.edit", index)
    assert task.sandbox is not None
    _, name, _, old, _, new = said(task).split()
    where, word = thought.split()
    assert (task.sandbox.files[name].split()[int(where) - 1], word) == (old, new)

    task, thought = high("agents.count", index)
    assert str(len(thought.split())) in task.data["files"].values()

    task, thought = high("agents.repair", index, 3)
    assert task.sandbox is not None
    files = [task.sandbox.files[name] for name in said(task).split("sum of ")[1].split(" and ")]
    assert [int(n) for n in thought.split()] == [sum(map(int, text.split())) for text in files]


@pytest.mark.parametrize("name", CODING)
@every_difficulty
def test_the_middle_level_of_a_program_is_all_of_it_but_the_last_step(name: str, difficulty: int):
    for index in range(20):
        task, part = high(name, index, difficulty)
        last = task.data["steps"].split("; ")[-1]
        for (value,), expected in zip(task.data["inputs"], task.data["expected"], strict=True):
            half = eval(part, dict.fromkeys(("x", "s", "xs"), value))
            assert eval(last, dict.fromkeys(("x", "s", "xs"), half)) == expected


@pytest.mark.parametrize("name", AGENTS)
@every_difficulty
def test_errands_take_one_call_a_turn_and_end_in_words(name: str, difficulty: int):
    source = load(name, difficulty=difficulty)
    for index in range(30):
        for effort in EFFORTS:
            task = source.task("train", index, effort)
            *acts, last = source.demonstrate(task) or []
            assert last == Message.assistant("done")
            assert all(len(turn.calls) == 1 and not turn.text for turn in acts)
            assert 2 <= len(acts) <= 5 + difficulty
            assert task.sandbox is not None
            assert {call.name for turn in acts for call in turn.calls} <= set(task.sandbox.tools)
            assert json.loads(json.dumps([dict(turn.calls[0].arguments) for turn in acts]))


@pytest.mark.parametrize("name", AGENTS)
def test_an_errand_writes_no_text_it_has_not_read(name: str):
    """Words it writes come from the prompt or from a file it has read before (numbers it may compute)."""
    source = load(name)
    for index in range(50):
        for effort in EFFORTS:
            task = source.task("train", index, effort)
            _, transcript, _ = play_turns(task, source.demonstrate(task) or [])
            known = said(task).replace(",", " ").replace(":", " ").split()
            for message in transcript[1:]:
                for call in message.calls:
                    used = " ".join(call.arguments.values()).split()
                    assert all(word in known or word.isdigit() for word in used), (task, call)
                known += [word for part in message.parts if message.role == "tool" for word in part.text.split()]  # type: ignore[union-attr]


def test_worked_examples():
    from nonet.tasks.general import Add, Multiply, Sort

    assert Add().work({"a": 47, "b": 385}) == ("12 13 4", "7+5+0=12 4+8+1=13 0+3+1=4")
    assert Multiply().work({"a": 385, "b": 7}) == ("35 59 26", "5*7+0=35 8*7+3=59 3*7+5=26")
    assert Sort().work({"word": "qkbd"}) == ("kq bd", "b qkd; d qk; k q; q")


# ------------------------------------------------------- nothing less scores


def lazy_turns(source, task: Task, other: Task) -> dict[str, list[Message]]:
    return {
        "nothing": [],
        "an empty answer": [Message.assistant("")],
        "only thinking": [Message.assistant(reasoning=said(task))],
        "the prompt": [Message.assistant(said(task))],
        "every word of the prompt": [Message.assistant(said(task).split()[-1])],
        "another task's solution": source.demonstrate(other),
        "a broken call": [Message.assistant(calls=(ToolCall("fly", {}),)), Message.assistant("done")],
        "words alone": [Message.assistant("done")],
        "an answer that crashes": [Message.assistant("def f(x): raise ValueError")],
        "an answer that does not parse": [Message.assistant("def f(x) return")],
    }


@every_source
@pytest.mark.parametrize("split", SPLITS)
def test_no_empty_copied_or_crashing_attempt_scores(name: str, split):
    source = load(name)
    for index in range(8):
        task = source.task(split, index)
        solution = [(t.text, t.calls) for t in source.demonstrate(task) or []]
        others = (source.task(split, i) for i in range(index + 1, index + 40))
        other = next(o for o in others if [(t.text, t.calls) for t in source.demonstrate(o) or []] != solution)
        for what, turns in lazy_turns(source, task, other).items():
            assert play_turns(task, turns)[0] == 0.0, (what, task)


# ------------------------------------------------------------------ the room


def test_importing_tasks_loads_neither_torch_nor_reasoning_gym():
    program = "import sys, nonet.tasks, nonet.sandbox; print({'torch', 'reasoning_gym'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_list_shows_every_source_with_an_example():
    infos = list_sources()
    assert [info.name for info in infos] == NAMES
    assert all(info.about and info.example and info.name.startswith(info.domain) for info in infos)


def test_about_one_problem_in_five_is_held_out():
    share = sum(split_of(f"problem {i}") == "heldout" for i in range(5000)) / 5000
    assert 0.17 < share < 0.23
