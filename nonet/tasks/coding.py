"""Write one small Python function from a description of a few steps; hidden inputs decide.

Efforts: low answers with the code; high first writes the expression of all steps but the last, from which the answer is
one step away; max writes each step as an expression of its own, then works an example through.

Invariant: every step changes the result on some hidden input, so an answer that leaves one out fails.
Refuses: programs whose hidden inputs all give one value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any

from nonet.tasks import steps as vocabulary
from nonet.tasks.source import Generated, Problem
from nonet.tasks.steps import ARITH, FOLDS, LETTERS, LISTS, MEASURES, STRINGS, Maker, Step
from nonet.types import Message, Task

TESTS = 6  # hidden inputs of each task
EXAMPLES: dict[str, Any] = {"int": 5, "str": "abc", "list": [3, 8, 5]}  # worked through in max reasoning


class Coding(Generated):
    """A chain of 2, 3 or 4 steps (difficulty 1, 2, 3), checked by `python_tests`."""

    domain = "coding"
    rewards = ("python_tests",)

    @abstractmethod
    def makers(self, rng: Random, count: int) -> Sequence[Maker]:
        """Which operations, in order; their constants are drawn afterwards."""

    def draw(self, rng: Random) -> Problem:
        while True:
            letters = "".join(rng.sample(LETTERS, 5))
            chain = [make(rng, letters) for make in self.makers(rng, 1 + self.difficulty)]
            inputs = [_value(rng, chain[0].takes, letters) for _ in range(TESTS)]
            expected = _outputs(chain, inputs)
            if expected is not None and _worthwhile(chain, inputs, expected):
                break
        data = {"function": "f", "inputs": [[value] for value in inputs], "expected": expected}
        return Problem(vocabulary.phrase(chain), {**data, **_solution(chain)})

    def demonstrate(self, task: Task) -> list[Message]:
        data = task.data
        reasoning = {"low": "", "high": data["part"], "max": f"{data['steps']}; {data['example']}"}
        return [Message.assistant(data["solution"], reasoning[task.effort])]


def _solution(chain: list[Step]) -> dict[str, str]:
    kind = chain[0].takes
    variable, example = vocabulary.VARIABLES[kind], EXAMPLES[kind]
    after = _outputs(chain[:1], [example]) and _try_values(chain, example)
    shown = " ".join(_plain(value) for value in after) if after else "no value"
    return {
        "solution": f"def f({variable}): return {vocabulary.expression(chain)}",
        "part": vocabulary.expression(chain[:-1]),
        "steps": "; ".join(step.of(vocabulary.VARIABLES[step.takes], vocabulary.ATOM) for step in chain),
        "example": f"{_plain(example)}: {shown}",
    }


def _plain(value: Any) -> str:
    return str(value).replace(" ", "") or "''"


def _try_values(chain: list[Step], start: Any) -> list[Any] | None:
    try:
        return vocabulary.values(chain, start)
    except (ValueError, IndexError):  # the largest, first or last of nothing
        return None


def _outputs(chain: list[Step], inputs: list[Any]) -> list[Any] | None:
    """The result for every input, or None if one of them has none."""
    out: list[Any] = []
    for value in inputs:
        after = _try_values(chain, value)
        if after is None:
            return None
        out.append(after[-1])
    return out


def _worthwhile(chain: list[Step], inputs: list[Any], expected: list[Any]) -> bool:
    if all(value == expected[0] for value in expected):
        return False
    for i, step in enumerate(chain):
        if step.takes == step.gives and _outputs(chain[:i] + chain[i + 1 :], inputs) == expected:
            return False
    return True


def _value(rng: Random, kind: str, letters: str) -> Any:
    if kind == "int":
        return rng.randint(-30, 99)
    if kind == "str":
        return "".join(rng.choices(letters, k=rng.randint(4, 8)))
    return [rng.randint(0, 50) for _ in range(rng.randint(4, 7))]


class Arith(Coding):
    name = "coding.arith"
    about = "arithmetic on one number"

    def makers(self, rng: Random, count: int) -> Sequence[Maker]:
        return rng.choices(ARITH, k=count)


class Strings(Coding):
    name = "coding.strings"
    about = "operations on one string"

    def makers(self, rng: Random, count: int) -> Sequence[Maker]:
        return rng.choices(STRINGS, k=count)


class Lists(Coding):
    name = "coding.lists"
    about = "filter, map and fold a list of numbers"

    def makers(self, rng: Random, count: int) -> Sequence[Maker]:
        return [*rng.choices(LISTS, k=count - 1), rng.choice(LISTS + FOLDS)]


class Compose(Coding):
    name = "coding.compose"
    about = "measure a string or a list, then compute with the number"

    def makers(self, rng: Random, count: int) -> Sequence[Maker]:
        before = rng.randint(0, count - 2)
        first, cross = rng.choice(((STRINGS, MEASURES), (LISTS, FOLDS)))
        return [*rng.choices(first, k=before), rng.choice(cross), *rng.choices(ARITH, k=count - 1 - before)]


SOURCES: tuple[type[Coding], ...] = (Arith, Strings, Lists, Compose)
