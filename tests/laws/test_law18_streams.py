"""Law 18: randomness is counter-based. Results do not depend on batch-mates, order, batch size or pause points."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from nonet.engine import Engine
from nonet.model import Model
from nonet.types import Completion, Request, Sampling

COUNT = 8
SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.0, top_k=5),
    Sampling(1.0, top_p=0.8),
    Sampling(0.0),
    Sampling(1.4, 9, 0.9),
    Sampling(1.0, min_p=0.1, repetition_penalty=1.3),
    Sampling(0.9, presence_penalty=0.8, frequency_penalty=0.4, logit_bias=((3, 1.0), (11, -2.0))),
]


def requests() -> list[Request]:
    """Different lengths, budgets and sampling settings; two of them share a prompt."""
    return [
        Request(
            f"r{i}", tuple(tiny.tokens(3 + i % 4, seed=i % 5).tolist()), 4 + i % 3, (11,), SETTINGS[i], f"stream {i}"
        )
        for i in range(COUNT)
    ]


def run(
    model: Model, asked: list[Request], steps_between: int = 0, pause_after: int = -1, **over
) -> dict[str, Completion]:
    """Submit with `steps_between` engine steps before each next one; pause once after `pause_after` steps and go on."""
    engine, done, partial = Engine(model, **over), [], {}
    for r in asked:
        engine.submit(r)
        done += [c for _ in range(steps_between) for c in engine.step()]
    if pause_after >= 0:
        done += [c for _ in range(pause_after) for c in engine.step()]
        for c in engine.pause():
            partial[c.id] = c
            engine.submit(next(r for r in asked if r.id == c.id).continued(c))
    done += engine.run()
    fields = ("tokens", "logprobs", "raw_logprobs")
    whole = {}
    for c in done:
        before = [getattr(partial[c.id], f) if c.id in partial else () for f in fields]
        joined = [b + getattr(c, f) for b, f in zip(before, fields, strict=True)]
        whole[c.id] = Completion(c.id, *joined, c.finish_reason, c.policy_version)
    return whole


few = settings(max_examples=12)
schedules = given(
    order=st.permutations(range(COUNT)),
    max_batch=st.integers(1, COUNT),
    steps_between=st.integers(0, 3),
    pause_after=st.integers(-1, 8),
)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {kind: tiny.model(kind) for kind in tiny.KINDS}


@pytest.fixture(scope="module")
def alone(models) -> dict[str, dict[str, Completion]]:
    """Every request run by itself."""
    return {kind: {r.id: run(m, [r], deterministic=True)[r.id] for r in requests()} for kind, m in models.items()}


@pytest.mark.parametrize("kind", tiny.KINDS)
@few
@schedules
def test_deterministic_results_are_bitwise_those_of_each_request_alone(
    models, alone, kind, order, max_batch, steps_between, pause_after
):
    asked = [requests()[i] for i in order]
    over = dict(max_batch=max_batch, deterministic=True)
    assert run(models[kind], asked, steps_between, pause_after, **over) == alone[kind]


@pytest.mark.parametrize("kind", tiny.KINDS)
@few
@schedules
def test_fast_results_have_the_same_tokens_and_logprobs_within_1e_4(
    models, alone, kind, order, max_batch, steps_between, pause_after
):
    asked = [requests()[i] for i in order]
    for name, c in run(models[kind], asked, steps_between, pause_after, max_batch=max_batch).items():
        expected = alone[kind][name]
        assert (c.tokens, c.finish_reason) == (expected.tokens, expected.finish_reason)
        assert c.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert c.raw_logprobs == pytest.approx(expected.raw_logprobs, abs=1e-4)


def test_seed_and_stream_decide_and_ids_do_not(models):
    def wrote(name: str, stream: str, seed: int) -> tuple[int, ...]:
        r = Request(name, (1, 2, 3), 12, sampling=Sampling(seed=seed), stream=stream)
        return run(models["hybrid"], [r])[name].tokens

    assert wrote("a", "x", 0) == wrote("b", "x", 0)
    assert len({wrote("a", "x", 0), wrote("a", "y", 0), wrote("a", "x", 1)}) == 3
    assert wrote("x", "", 0) == wrote("a", "x", 0)  # without a stream the id names it


def test_siblings_of_one_prompt_draw_differently(models):
    asked = [Request(f"s{i}", (4, 5, 6), 10, stream=f"s{i}") for i in range(5)]
    assert len({c.tokens for c in run(models["gqa"], asked).values()}) == 5
