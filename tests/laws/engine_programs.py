"""Random programs against an engine: submit, branch, extend, pause, resume, abort, new weights, in a memory too small
for comfort. A program is a pure function of its seed and of what the engine answers.

`make test` runs a quarter of them or more; `make evidence NAME=engine` and NONET_PROGRAMS=all run all.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tiny
import torch

from nonet.engine import Engine
from nonet.engine.drafter import Drafter
from nonet.model import Model
from nonet.types import Completion, Request, Sampling

VOCAB, CONTEXT = 61, 160
SMALL = dict(vocab=VOCAB, max_position=CONTEXT)
SAMPLINGS = (
    Sampling(1.0, seed=1),
    Sampling(0.0),
    Sampling(0.8, top_k=9, seed=2),
    Sampling(1.2, top_p=0.9, min_p=0.02, seed=3),
    Sampling(1.0, seed=4, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias=((5, 1.5),)),
)
TWO = dict(layers=2, mixers=("kda", "mla"))
# The experts of these tests are loud: float32 alone is worth 2.5e-5 there.
EXACT = dict(dtype=torch.float64)
MODELS = {
    "hybrid": ("hybrid", TWO),
    "gqa": ("gqa", {}),
    "k3": ("k3", EXACT),
    "kimi_linear": ("kimi_linear", EXACT),
    "hybrid with mtp": ("hybrid", {**TWO, "mtp_layers": 1}),
}
ALL = os.environ.get("NONET_PROGRAMS") == "all"
NEEDED = ("tokens_cached_total", "preemptions_total")  # without these a program tests little
TIGHT = dict(pages=10, chunk=24, max_batch=4, snapshots=5, cache_bytes=1 << 14)


def checked(kind: str, first: int, count: int, deterministic: bool, **over: Any) -> Counter[str]:
    """Figures of `count` programs from seed `first` on; of a quarter of them and as many more as it takes until what is
    needed has happened, unless all are asked for.
    """
    through: Counter[str] = Counter()
    for done, seed in enumerate(range(first, first + count)):
        if not ALL and done >= count / 4 and all(through[name] for name in NEEDED):
            break
        through += check(kind, seed, deterministic, **over)
    assert all(through[name] for name in NEEDED), "the programs test nothing"
    return through


@dataclass
class Program:
    """Runs against `engine`; `asked` and `done` (partials joined) by id, with the version each request ran under."""

    engine: Engine
    versions: list[dict]
    seed: int
    random: random.Random = field(init=False)
    asked: dict[str, Request] = field(default_factory=dict)
    under: dict[str, int] = field(default_factory=dict)
    done: dict[str, Completion] = field(default_factory=dict)
    parts: dict[str, list[Completion]] = field(default_factory=dict)
    aborted: dict[str, Completion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.systems = [self.words(n) for n in (37, 16, 5)]

    def run(self, operations: int = 14) -> Iterator[None]:
        """Yields after every operation."""
        names = ("submit", "submit", "twins", "branch", "extend", "steps", "steps", "steps", "pause", "abort", "swap")
        for _ in range(operations):
            getattr(self, self.random.choice(names))()
            yield
        self.finish()
        yield

    # -------------------------------------------------------------- operations

    def submit(self) -> None:
        self.ask(self.random.choice(self.systems) + self.words(self.random.randint(1, 25)))

    def twins(self) -> None:
        prompt = self.random.choice(self.systems) + self.words(self.random.randint(1, 12))
        for _ in range(3):
            self.ask(prompt)

    def branch(self) -> None:
        """An earlier prompt, cut anywhere, and another ending."""
        prompt = self.earlier()
        self.ask(prompt[: self.random.randint(1, len(prompt))] + self.words(self.random.randint(1, 9)))

    def extend(self) -> None:
        """A conversation goes on: an earlier prompt, its answer, and more."""
        if self.done:
            name = self.random.choice(sorted(self.done))
            self.ask(self.asked[name].tokens + self.done[name].tokens + self.words(self.random.randint(1, 9)))

    def steps(self) -> None:
        for _ in range(self.random.randint(1, 9)):
            self.collect(self.engine.step())

    def pause(self) -> None:
        for c in self.engine.pause():
            self.parts.setdefault(c.id, []).append(c)
        if self.random.random() < 0.5:
            self.engine.resume()
        else:
            running = [n for n in self.asked if n not in self.done and n not in self.aborted]
            self.random.shuffle(running)
            for name in running:
                self.engine.submit(self.left(name))

    def abort(self) -> None:
        running = [n for n in self.asked if n not in self.done and n not in self.aborted]
        if running:
            name = self.random.choice(running)
            ended = self.engine.abort(name)
            assert ended is not None
            self.aborted[name] = joined([*self.parts.get(name, []), ended])

    def swap(self) -> None:
        """Other weights, when nobody is writing."""
        self.finish()
        version = self.engine.version + 1
        self.engine.load(version, self.versions[version % len(self.versions)])

    # ----------------------------------------------------------------- pieces

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCAB) for _ in range(count))

    def earlier(self) -> tuple[int, ...]:
        return self.asked[self.random.choice(sorted(self.asked))].tokens if self.asked else self.systems[0]

    def ask(self, prompt: tuple[int, ...]) -> None:
        name, prompt = f"r{len(self.asked)}", prompt[: CONTEXT - 30]
        budget = self.random.randint(1, 24)
        edges = sorted(self.random.sample(range(1, len(prompt) + 1), min(2, len(prompt))))
        request = Request(
            name, prompt, budget, (7,), self.random.choice(SAMPLINGS), f"stream {name}", self.random.random() < 0.5,
            boundaries=tuple(edges) if self.random.random() < 0.6 else (),
        )  # fmt: skip
        self.asked[name], self.under[name] = request, self.engine.version
        self.engine.submit(request)

    def left(self, name: str) -> Request:
        request = self.asked[name]
        return request.continued(joined(self.parts[name])) if name in self.parts else request

    def finish(self) -> None:
        while self.engine.busy:
            self.collect(self.engine.step())

    def collect(self, completions: list[Completion]) -> None:
        for c in completions:
            self.done[c.id] = joined([*self.parts.get(c.id, []), c])


def check(
    kind: str,
    seed: int,
    deterministic: bool,
    drafter: Callable[[Model], Drafter] | None = None,
    same: Callable[[Request], bool] = lambda request: True,
) -> Counter[str]:
    """One program; completions of requests that are to be the `same` must be those of requests alone, without a
    drafter. Returns what it went through.
    """
    base, over = MODELS[kind]
    made, versions = tiny.model(base, **{**SMALL, **over}), weights(base, **over)
    engine = Engine(made, deterministic=deterministic, drafter=drafter and drafter(made), **TIGHT)
    program = Program(engine, versions, seed)
    for _ in program.run():
        engine.scheduler.check()
    found = {k: int(v) for k, v in engine.figures().items()}
    expected = alone(tiny.model(base, **{**SMALL, **over}), versions, program, deterministic)
    assert program.done.keys() | program.aborted.keys() == program.asked.keys()
    for name, c in program.done.items():
        if same(program.asked[name]):
            agree(c, expected[name], 0 if deterministic else 1e-5)
    for name, c in program.aborted.items():
        if same(program.asked[name]):
            assert c.tokens == expected[name].tokens[: len(c.tokens)], f"seed {seed}: {name}, aborted"
    return Counter(found)


def agree(c: Completion, expected: Completion, bound: float) -> None:
    assert (c.tokens, c.finish_reason) == (expected.tokens, expected.finish_reason), c.id
    assert c.logprobs == pytest.approx(expected.logprobs, abs=bound, rel=0), c.id
    assert c.raw_logprobs == pytest.approx(expected.raw_logprobs, abs=bound, rel=0), c.id


def joined(pieces: list[Completion]) -> Completion:
    names = ("tokens", "logprobs", "raw_logprobs")
    sums = {name: tuple(x for p in pieces for x in getattr(p, name)) for name in names}
    return replace(pieces[-1], **sums, cached_tokens=0, drafted_tokens=0, accepted_tokens=0)


def alone(model: Model, versions: list[dict], program: Program, deterministic: bool) -> dict[str, Completion]:
    """What every request of a program writes without a cache, in a memory without limits, batched by version."""
    out = {}
    for version in sorted(set(program.under.values())):
        model.load_state_dict(versions[version % len(versions)])
        engine = Engine(model, deterministic=deterministic, version=version, prefix_cache=False)
        for name, request in program.asked.items():
            if program.under[name] == version:
                engine.submit(request)
        out |= {c.id: replace(c, cached_tokens=0) for c in engine.run()}
    return out


def weights(kind: str, **over) -> list[dict]:
    return [tiny.model(kind, seed=s, **{**SMALL, **over}).state_dict() for s in (0, 7)]
