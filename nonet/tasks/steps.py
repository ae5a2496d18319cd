"""The vocabulary of the coding tasks: one-step operations with a phrase, a Python expression and a meaning.

Invariant: an expression put together from steps means exactly what the steps' functions compute one after another
(parentheses appear where precedence needs them, and nowhere else).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SUM, TERM, UNARY, ATOM = 0, 1, 2, 3  # how tightly an expression binds
VARIABLES = {"int": "x", "str": "s", "list": "xs"}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: "add 3" = `{}+3`. `needs` is how tightly the operand must bind, `binds` how the result does."""

    name: str
    takes: str
    gives: str
    phrase: str
    template: str
    needs: int
    binds: int
    apply: Callable[[Any], Any]

    def of(self, operand: str, binds: int) -> str:
        return self.template.replace("{}", operand if binds >= self.needs else f"({operand})")


def expression(steps: list[Step]) -> str:
    """The steps as one expression of the variable.

    "add 3, then double" is `(x+3)*2`, while "double, then add 3" needs no parentheses: `x*2+3`.
    """
    out, binds = VARIABLES[steps[0].takes], ATOM
    for step in steps:
        out, binds = step.of(out, binds), step.binds
    return out


def phrase(steps: list[Step]) -> str:
    *most, last = [step.phrase for step in steps]
    return f"f({VARIABLES[steps[0].takes]}): {', '.join(most)}{', then ' if most else ''}{last}"


def values(steps: list[Step], start: Any) -> list[Any]:
    """The value after each step."""
    out: list[Any] = []
    for step in steps:
        start = step.apply(start)
        out.append(start)
    return out


Maker = Callable[[Random, str], Step]  # (random numbers, letters the test strings are made of) -> a step


def _fixed(
    name: str, takes: str, gives: str, template: str, needs: int, binds: int, apply: Callable[[Any], Any]
) -> Maker:
    step = Step(name, takes, gives, name, template, needs, binds, apply)
    return lambda rng, letters: step


def _constant(
    name: str, kind: tuple[str, str], words: str, template: str, rank: tuple[int, int], span: tuple[int, int],
    apply: Callable[[Any, int], Any],
) -> Maker:  # fmt: skip
    def make(rng: Random, letters: str) -> Step:
        n = rng.randint(*span)
        text = words.replace("#", str(n)), template.replace("#", str(n))
        return Step(name, *kind, *text, *rank, lambda value: apply(value, n))

    return make


def _letter(
    name: str, kind: tuple[str, str], words: str, template: str, rank: tuple[int, int],
    apply: Callable[[str, str], Any],
) -> Maker:  # fmt: skip
    def make(rng: Random, letters: str) -> Step:
        c = rng.choice(letters)
        text = words.replace("#", c), template.replace("#", c)
        return Step(name, *kind, *text, *rank, lambda value: apply(value, c))

    return make


def _replace(rng: Random, letters: str) -> Step:
    old, new = rng.choice(letters), rng.choice(LETTERS)
    text = f"replace {old} with {new}", f"{{}}.replace('{old}','{new}')"
    return Step("replace", "str", "str", *text, ATOM, ATOM, lambda value: value.replace(old, new))


_II, _SS, _LL, _LI, _SI = ("int", "int"), ("str", "str"), ("list", "list"), ("list", "int"), ("str", "int")

ARITH: tuple[Maker, ...] = (
    _fixed("double", *_II, "{}*2", TERM, TERM, lambda v: v * 2),
    _fixed("square", *_II, "{}**2", ATOM, UNARY, lambda v: v * v),
    _fixed("negate", *_II, "-{}", ATOM, UNARY, lambda v: -v),
    _fixed("absolute", *_II, "abs({})", SUM, ATOM, abs),
    _constant("add", _II, "add #", "{}+#", (SUM, SUM), (1, 99), lambda v, n: v + n),
    _constant("subtract", _II, "subtract #", "{}-#", (SUM, SUM), (1, 99), lambda v, n: v - n),
    _constant("times", _II, "times #", "{}*#", (TERM, TERM), (3, 20), lambda v, n: v * n),
    _constant("mod", _II, "mod #", "{}%#", (TERM, TERM), (2, 20), lambda v, n: v % n),
    _constant("divide", _II, "floor divide by #", "{}//#", (TERM, TERM), (2, 9), lambda v, n: v // n),
)
STRINGS: tuple[Maker, ...] = (
    _fixed("reverse", *_SS, "{}[::-1]", ATOM, ATOM, lambda v: v[::-1]),
    _fixed("upper", *_SS, "{}.upper()", ATOM, ATOM, str.upper),
    _constant("repeat", _SS, "repeat # times", "{}*#", (TERM, TERM), (2, 5), lambda v, n: v * n),
    _constant("drop first", _SS, "drop first #", "{}[#:]", (ATOM, ATOM), (1, 3), lambda v, n: v[n:]),
    _constant("drop last", _SS, "drop last #", "{}[:-#]", (ATOM, ATOM), (1, 3), lambda v, n: v[:-n]),
    _constant("keep first", _SS, "keep first #", "{}[:#]", (ATOM, ATOM), (1, 4), lambda v, n: v[:n]),
    _letter("append", _SS, "append #", "{}+'#'", (SUM, SUM), lambda v, c: v + c),
    _letter("prepend", _SS, "prepend #", "'#'+{}", (SUM, SUM), lambda v, c: c + v),
    _letter("remove", _SS, "remove #", "{}.replace('#','')", (ATOM, ATOM), lambda v, c: v.replace(c, "")),
    _replace,
)
LISTS: tuple[Maker, ...] = (
    _fixed("keep even", *_LL, "[x for x in {} if x%2==0]", SUM, ATOM, lambda v: [x for x in v if x % 2 == 0]),
    _fixed("keep odd", *_LL, "[x for x in {} if x%2]", SUM, ATOM, lambda v: [x for x in v if x % 2]),
    _fixed("sort", *_LL, "sorted({})", SUM, ATOM, sorted),
    _fixed("reverse", *_LL, "{}[::-1]", ATOM, ATOM, lambda v: v[::-1]),
    _constant("drop first", _LL, "drop first #", "{}[#:]", (ATOM, ATOM), (1, 3), lambda v, n: v[n:]),
    _constant("keep over", _LL, "keep over #", "[x for x in {} if x>#]", (SUM, ATOM), (5, 40),
              lambda v, n: [x for x in v if x > n]),
    _constant("keep under", _LL, "keep under #", "[x for x in {} if x<#]", (SUM, ATOM), (10, 45),
              lambda v, n: [x for x in v if x < n]),
    _constant("add each", _LL, "add # to each", "[x+# for x in {}]", (SUM, ATOM), (1, 50),
              lambda v, n: [x + n for x in v]),
    _constant("times each", _LL, "times # each", "[x*# for x in {}]", (SUM, ATOM), (2, 20),
              lambda v, n: [x * n for x in v]),
    _constant("mod each", _LL, "mod # each", "[x%# for x in {}]", (SUM, ATOM), (2, 20),
              lambda v, n: [x % n for x in v]),
)  # fmt: skip
FOLDS: tuple[Maker, ...] = (  # a list becomes a number
    _fixed("sum", "list", "int", "sum({})", SUM, ATOM, sum),
    _fixed("max", "list", "int", "max({})", SUM, ATOM, max),
    _fixed("min", "list", "int", "min({})", SUM, ATOM, min),
    _fixed("length", "list", "int", "len({})", SUM, ATOM, len),
    _fixed("first", "list", "int", "{}[0]", ATOM, ATOM, lambda v: v[0]),
    _fixed("last", "list", "int", "{}[-1]", ATOM, ATOM, lambda v: v[-1]),
    _constant("count over", _LI, "count over #", "sum(x># for x in {})", (SUM, ATOM), (3, 45),
              lambda v, n: sum(x > n for x in v)),
    _constant("count under", _LI, "count under #", "sum(x<# for x in {})", (SUM, ATOM), (5, 47),
              lambda v, n: sum(x < n for x in v)),
)  # fmt: skip
MEASURES: tuple[Maker, ...] = (  # a string becomes a number
    _fixed("length", "str", "int", "len({})", SUM, ATOM, len),
    _letter("count", _SI, "count #", "{}.count('#')", (ATOM, ATOM), lambda v, c: v.count(c)),
    _letter("find", _SI, "find #", "{}.find('#')", (ATOM, ATOM), lambda v, c: v.find(c)),
)
