"""Small problems that are hard in one step and easy with scratch work: add, multiply, reverse, sort, count.

Each demonstration writes as much as its effort allows: low answers at once; high writes one real intermediate result
(column sums with carries, the halves sorted or reversed), from which the answer is one step away; max works every step
out, lowest digit first.

Invariant: at max effort no step needs more than single digits or one comparison, and the answer is a copy of what
the scratch holds. Refuses: problems that copying would solve (a sorted word, a palindrome).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from random import Random
from typing import Any

from nonet.tasks.source import Generated, Problem
from nonet.types import Message, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class General(Generated):
    """One question, one short answer, checked by `exact`."""

    domain = "general"

    @abstractmethod
    def work(self, data: Mapping[str, Any]) -> tuple[str, str]:
        """(scratch at high effort, scratch at max effort) for a drawn problem."""

    def demonstrate(self, task: Task) -> list[Message]:
        high, full = self.work(task.data) if task.effort != "low" else ("", "")
        return [Message.assistant(task.data["answer"], {"low": "", "high": high, "max": full}[task.effort])]


class Add(General):
    name = "general.add"
    about = "the sum of two numbers"

    def draw(self, rng: Random) -> Problem:
        low, high = {1: (2, 3), 2: (3, 3), 3: (4, 6)}[self.difficulty]
        a, b = _digits(rng, low, high), _digits(rng, low, high)
        data = {"a": a, "b": b, "answer": str(a + b)}
        return Problem(f"add {a} {b}", data, statement=f"add {min(a, b)} {max(a, b)}")

    def work(self, data: Mapping[str, Any]) -> tuple[str, str]:
        columns = _columns(data["a"], data["b"])
        return " ".join(str(sum(c)) for c in columns), " ".join(f"{x}+{y}+{c}={x + y + c}" for x, y, c in columns)


class Multiply(General):
    name = "general.multiply"
    about = "the product of two numbers"

    def draw(self, rng: Random) -> Problem:
        if self.difficulty < 3:
            a = _digits(rng, *((2, 3) if self.difficulty == 1 else (3, 4)))
            b = rng.randint(2, 9)
        else:
            a, b = _digits(rng, 2, 3), _digits(rng, 2, 2)
        first, second = (a, b) if rng.random() < 0.5 else (b, a)
        data = {"a": a, "b": b, "answer": str(a * b)}
        return Problem(f"multiply {first} {second}", data, statement=f"multiply {min(a, b)} {max(a, b)}")

    def work(self, data: Mapping[str, Any]) -> tuple[str, str]:
        a, b = data["a"], data["b"]
        if b < 10:
            return _times_digit(a, b)
        tens, ones = b // 10, b % 10
        high = f"{a * ones} {a * tens}0 {a * b}"
        steps = [f"{a}*{ones}: {_times_digit(a, ones)[1]}", f"{a}*{tens}: {_times_digit(a, tens)[1]}"]
        sums = " ".join(f"{x}+{y}+{c}={x + y + c}" for x, y, c in _columns(a * ones, a * tens * 10))
        return high, "; ".join([*steps, sums])


class Reverse(General):
    name = "general.reverse"
    about = "a string of letters backwards"

    def draw(self, rng: Random) -> Problem:
        while True:
            word = _string(rng, LETTERS, *{1: (4, 5), 2: (6, 8), 3: (9, 12)}[self.difficulty])
            if word != word[::-1]:
                return Problem(f"reverse {word}", {"word": word, "answer": word[::-1]})

    def work(self, data: Mapping[str, Any]) -> tuple[str, str]:
        word = data["word"]
        middle = len(word) // 2
        numbered = [f"{i}{letter}" for i, letter in enumerate(word, 1)]
        halves = f"{word[:middle][::-1]} {word[middle:][::-1]}"
        return halves, f"{' '.join(numbered)}; {' '.join(reversed(numbered))}"


class Sort(General):
    name = "general.sort"
    about = "letters or digits in order"

    def draw(self, rng: Random) -> Problem:
        while True:
            alphabet = LETTERS if rng.random() < 0.5 else "0123456789"
            word = _string(rng, alphabet, *{1: (4, 5), 2: (6, 8), 3: (9, 12)}[self.difficulty])
            answer = "".join(sorted(word))
            if word != answer:
                return Problem(f"sort {word}", {"word": word, "answer": answer})

    def work(self, data: Mapping[str, Any]) -> tuple[str, str]:
        word = data["word"]
        middle = len(word) // 2
        halves = f"{''.join(sorted(word[:middle]))} {''.join(sorted(word[middle:]))}"
        steps: list[str] = []
        while word:  # the smallest that is left, then what remains
            smallest = min(word)
            word = word.replace(smallest, "", 1)
            steps.append(f"{smallest} {word}".strip())
        return halves, "; ".join(steps)


class Count(General):
    name = "general.count"
    about = "how often a letter occurs"

    def draw(self, rng: Random) -> Problem:
        few = "".join(rng.sample(LETTERS, 3))
        word = _string(rng, few, *{1: (6, 8), 2: (9, 12), 3: (13, 20)}[self.difficulty])
        letter = rng.choice(few)
        return Problem(f"count {letter} in {word}", {"letter": letter, "word": word, "answer": str(word.count(letter))})

    def work(self, data: Mapping[str, Any]) -> tuple[str, str]:
        letter, seen, steps = data["letter"], 0, []
        for other in data["word"]:
            seen += other == letter
            steps.append(f"{other}{seen}")
        return letter * seen or "none", " ".join(steps)


SOURCES: tuple[type[General], ...] = (Add, Multiply, Reverse, Sort, Count)


# ------------------------------------------------------------------ drawing


def _digits(rng: Random, low: int, high: int) -> int:
    """A number of `low` to `high` digits, each length equally likely."""
    length = rng.randint(low, high)
    return rng.randint(10 ** (length - 1), 10**length - 1)


def _string(rng: Random, alphabet: str, low: int, high: int) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))


# ------------------------------------------------------------------ working


def _columns(a: int, b: int) -> list[tuple[int, int, int]]:
    """(digit, digit, carry in) of each column of a + b, lowest first."""
    out: list[tuple[int, int, int]] = []
    carry = 0
    while a or b:
        out.append((a % 10, b % 10, carry))
        carry = sum(out[-1]) // 10
        a, b = a // 10, b // 10
    return out


def _times_digit(a: int, b: int) -> tuple[str, str]:
    """Column results of a * b, lowest first, short and with their working."""
    short: list[str] = []
    full: list[str] = []
    carry = 0
    while a:
        value = a % 10 * b + carry
        short.append(str(value))
        full.append(f"{a % 10}*{b}+{carry}={value}")
        carry, a = value // 10, a // 10
    return " ".join(short), " ".join(full)
