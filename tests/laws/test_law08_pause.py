"""Law 8: pausing anywhere under unchanged weights yields the same trajectory: bitwise in the deterministic mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
import tiny

from nonet.chat import Tokenizer
from nonet.engine import Engine
from nonet.model import Model
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import scorer
from nonet.types import Completion, Request, Sampling, Trajectory

# ------------------------------------------------------------------------- one engine


def requests(greedy: bool) -> list[Request]:
    sampling = Sampling(0.0 if greedy else 1.3, seed=4)
    lengths, budgets = (5, 9, 5), (11, 6, 14)
    return [
        Request(f"r{i}", tuple(tiny.tokens(n, seed=i).tolist()), b, stop_ids=(7,), sampling=sampling)
        for i, (n, b) in enumerate(zip(lengths, budgets, strict=True))
    ]


def with_pauses(engine: Engine, asked: list[Request], every: int) -> dict[str, Completion]:
    """All requests finished by an engine that is paused after every `every` steps, partials joined."""
    parts: dict[str, list[Completion]] = {r.id: [] for r in asked}
    waiting = list(asked)
    while waiting:
        for r in waiting:
            engine.submit(r)
        ended = [c for _ in range(every) for c in engine.step()]
        partial = engine.pause()
        for c in [*ended, *partial]:
            parts[c.id].append(c)
        running = {r.id: r for r in waiting}
        waiting = [running[c.id].continued(c) for c in partial]
    return {name: joined(pieces) for name, pieces in parts.items()}


def joined(pieces: list[Completion]) -> Completion:
    sums = {f: tuple(x for p in pieces for x in getattr(p, f)) for f in ("tokens", "logprobs", "raw_logprobs")}
    return Completion(pieces[0].id, **sums, finish_reason=pieces[-1].finish_reason, policy_version=0)


def uncut(model: Model, asked: list[Request], deterministic: bool) -> dict[str, Completion]:
    engine = Engine(model, deterministic=deterministic)
    for r in asked:
        engine.submit(r)
    return {c.id: c for c in engine.run()}


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_deterministic_completions_are_bitwise_the_same_at_every_cut(kind, greedy):
    """sglang-jax#580: greedy continuation differs after resume."""
    m = tiny.model(kind)
    whole = uncut(m, requests(greedy), True)
    for every in (1, 2, 3, 5, 8, 13):
        assert with_pauses(Engine(m, deterministic=True), requests(greedy), every) == whole, f"paused every {every}"


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_fast_completions_have_the_same_tokens_and_logprobs_within_1e_4(kind):
    m = tiny.model(kind)
    whole = uncut(m, requests(False), False)
    for every in range(1, 15):
        for name, c in with_pauses(Engine(m), requests(False), every).items():
            assert c.tokens == whole[name].tokens, f"paused every {every}"
            assert c.logprobs == pytest.approx(whole[name].logprobs, abs=1e-4)
            assert c.raw_logprobs == pytest.approx(whole[name].raw_logprobs, abs=1e-4)


# ------------------------------------------------- whole rollouts: tools, sandboxes, rewards


class Impatient:
    """A Generator that claims to be idle after `every` steps, so that Rollout pauses there and parks everything."""

    def __init__(self, engine: Engine, every: int):
        self.engine, self.every, self.left = engine, every, every
        self.version, self.context = engine.version, engine.context

    def submit(self, request: Request) -> None:
        self.engine.submit(request)

    def step(self) -> list[Completion]:
        self.left -= 1
        return self.engine.step()

    def pause(self) -> list[Completion]:
        self.left = self.every
        return self.engine.pause()

    @property
    def busy(self) -> bool:
        return self.left > 0 and self.engine.busy


def roll(
    model: Model,
    nano: Tokenizer,
    groups: Iterable[int],
    samples: int,
    every: int | None,
    deterministic: bool,
    temperature=1.2,
) -> list[Trajectory]:
    """Trajectories of some errands and puzzles; every: engine steps between pauses (None: never)."""
    setting = tiny.setting(nano)
    engine = Engine(model, deterministic=deterministic)
    generator = engine if every is None else Impatient(engine, every)
    rollout = Rollout(generator, setting.opener("train"), scorer(setting.rewards_of), Sampling(temperature, seed=1), 70)
    all_ = [Trajectory(setting.task("train", g).id, g, s) for g in groups for s in range(samples)]
    for _ in range(2000):
        if not (active := [t for t in all_ if t.status in ("new", "parked")]):
            return all_
        rollout.run(active, len(active))
    raise AssertionError("rollout does not end")


def record(t: Trajectory) -> dict[str, Any]:
    """All that a trajectory is, but its last sandbox checkpoint: one that was never parked has none."""
    return {**asdict(t), "sandbox": None}


@pytest.mark.parametrize(("groups", "every"), [([2], 1), ([2, 3], 2), ([0, 1, 4], 7), ([0, 4, 6], 30)])
def test_deterministic_trajectories_are_bitwise_the_same_however_often_parked(policy, nano, groups, every):
    """every = 1 parks, checkpoints and resumes after every token, and between a tool's call and its result."""
    whole = roll(policy, nano, groups, 1, None, True, 0.7)
    assert sum(s.author == "tool" for t in whole for s in t.segments) >= 2
    assert any(t.reward == 1 for t in whole)
    assert [record(t) for t in roll(policy, nano, groups, 1, every, True, 0.7)] == [record(t) for t in whole]


@pytest.mark.parametrize("every", [2, 7])
def test_fast_trajectories_have_the_same_tokens_rewards_and_logprobs_within_1e_4(policy, nano, every):
    whole = roll(policy, nano, range(6), 4, None, False)
    for a, b in zip(whole, roll(policy, nano, range(6), 4, every, False), strict=True):
        assert a.tokens == b.tokens
        assert (a.rewards, a.stop_reason, a.status, a.harness) == (b.rewards, b.stop_reason, b.status, b.harness)
        for x, y in zip(a.segments, b.segments, strict=True):
            assert (x.author, x.tokens, x.texts, x.policy_version) == (y.author, y.tokens, y.texts, y.policy_version)
            assert y.logprobs == pytest.approx(x.logprobs, abs=1e-4)
            assert y.raw_logprobs == pytest.approx(x.raw_logprobs, abs=1e-4)


def test_rollouts_under_test_really_use_their_sandboxes(policy, nano):
    """The comparison above means something: errands end with files moved, some attempts succeed, some do not."""
    rewards = [t.reward for t in roll(policy, nano, range(6), 4, None, False)]
    assert 0 < sum(rewards) < len(rewards)
