"""Speculation in the engine: budgets, stops, memory, counts. That it changes nothing is law 5."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from drafters import Echo

from nonet.engine import Engine
from nonet.engine.divergence import first_divergence
from nonet.engine.drafter import Proposal
from nonet.engine.feed import draws
from nonet.engine.lookup import PromptLookup
from nonet.engine.row import Drafts, Row, pages_for
from nonet.ops.rng import uniforms
from nonet.types import Completion, Request, Sampling, UserError

GREEDY = Sampling(0.0)
kinds = pytest.mark.parametrize("kind", tiny.KINDS)


def request(name: str = "r", length: int = 7, max_tokens: int = 12, seed: int = 0, **over) -> Request:
    prompt = tuple(tiny.tokens(length, seed=seed).tolist())
    return Request(**{"id": name, "tokens": prompt, "max_tokens": max_tokens, "stream": f"{name}!", **over})


def run(engine: Engine, *requests: Request) -> dict[str, Completion]:
    for r in requests:
        engine.submit(r)
    return {c.id: c for c in engine.run()}


def written(c: Completion) -> Completion:
    return replace(c, drafted_tokens=0, accepted_tokens=0)


# ------------------------------------------------------------------------ budgets and stops


@pytest.mark.parametrize("budget", range(1, 12))
def test_a_perfect_draft_of_eight_never_writes_more_than_was_asked_for(budget):
    m = tiny.model()
    engine = Engine(m, deterministic=True, drafter=Echo(m, steps=8, wrong=0))
    (c,) = run(engine, request(max_tokens=budget, sampling=GREEDY)).values()
    (plain,) = run(Engine(m, deterministic=True), request(max_tokens=budget, sampling=GREEDY)).values()
    assert written(c) == plain and len(c.tokens) == budget
    assert c.accepted_tokens <= c.drafted_tokens <= max(0, budget - 1) * 8


def test_a_context_is_filled_to_its_last_position():
    m = tiny.model("gqa", max_position=40)
    (c,) = run(Engine(m, drafter=Echo(m, steps=6, wrong=0)), request(max_tokens=33, sampling=GREEDY)).values()
    (plain,) = run(Engine(m), request(max_tokens=33, sampling=GREEDY)).values()
    assert c.tokens == plain.tokens and len(c.tokens) == 33 and c.accepted_tokens > 9


@pytest.mark.parametrize("kind", ["hybrid", "gqa"])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_inside_an_accepted_run_ends_the_request_there_and_it_can_be_continued(kind, at):
    m = tiny.model(kind)
    plain = run(Engine(m, deterministic=True), request(sampling=GREEDY))["r"]
    stop, first = plain.tokens[at], plain.tokens.index(plain.tokens[at])
    engine = Engine(m, deterministic=True, drafter=Echo(m, steps=6, wrong=0))
    c = run(engine, request(sampling=GREEDY, stop_ids=(stop,), hold=True))["r"]
    assert (c.tokens, c.finish_reason) == (plain.tokens[: first + 1], "stop")
    assert c.accepted_tokens <= len(c.tokens)
    more = Request("r", (*request().tokens, *c.tokens, 5, 3), 9, sampling=GREEDY, stream="r!")
    again, fresh = run(engine, more)["r"], run(Engine(m, deterministic=True), more)["r"]
    assert again.cached_tokens and written(again) == replace(fresh, cached_tokens=again.cached_tokens)


def test_a_stop_text_inside_an_accepted_run_ends_the_request_there():
    m = tiny.model()
    plain = run(Engine(m), request(sampling=GREEDY))["r"]
    spell = lambda ids: "".join(chr(97 + i % 26) + str(i) for i in ids)  # noqa: E731
    text = spell(plain.tokens[3:5])
    engine = Engine(m, decode=spell, drafter=Echo(m, steps=6, wrong=0))
    c = run(engine, request(sampling=GREEDY, stop_texts=(text,)))["r"]
    assert c.finish_reason == "stop" and text in spell(c.tokens) and text not in spell(c.tokens[:-1])


@kinds
@pytest.mark.parametrize("native", [True, False])
def test_everything_about_a_token_is_what_it_would_have_been(kind, native):
    """Log-probs of both kinds and the likeliest others, at every position of a run; C adds in the same order."""
    m = tiny.model(kind)
    how = Sampling(0.9, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4, seed=3)
    asked = [request(f"r{i}", 5 + i, 20, i, sampling=how, top_logprobs=3) for i in range(4)]
    found = run(Engine(m, native=native, drafter=Echo(m)), *asked)
    for name, plain in run(Engine(m, native=native), *asked).items():
        c = found[name]
        assert c.tokens == plain.tokens
        assert c.logprobs == pytest.approx(plain.logprobs, abs=0 if native else 1e-4)
        assert c.raw_logprobs == pytest.approx(plain.raw_logprobs, abs=0 if native else 1e-4)
        assert [[t for t, _ in top] for top in c.top_logprobs] == [[t for t, _ in top] for top in plain.top_logprobs]


@kinds
def test_sampled_drafts_leave_every_logprob_that_of_a_fresh_full_forward(kind):
    m = tiny.model(kind)
    asked = [request(f"r{i}", 4 + i, 20, i, sampling=Sampling(0.8, top_k=30, seed=i)) for i in range(5)]
    done = run(Engine(m, drafter=Echo(m, sampled=True)), *asked)
    assert sum(c.accepted_tokens for c in done.values()) > 10
    for r in asked:
        c = done[r.id]
        with torch.no_grad():
            logits = m.logits(m(torch.tensor([[*r.tokens, *c.tokens]])))[0, len(r.tokens) - 1 : -1]
        raw = logits.log_softmax(-1)[torch.arange(20), torch.tensor(c.tokens)]
        assert c.raw_logprobs == pytest.approx(raw.tolist(), abs=2e-4)
        kept = (logits / 0.8).topk(30).values.logsumexp(-1)
        after = logits[torch.arange(20), torch.tensor(c.tokens)] / 0.8 - kept
        assert c.logprobs == pytest.approx(after.tolist(), abs=2e-4)


@pytest.mark.parametrize("pause", [20, 41, 55])
def test_draws_are_counted_by_position_however_long_the_text_and_wherever_it_pauses(pause):
    m = tiny.model()
    plain = run(Engine(m, deterministic=True), request(max_tokens=150))["r"]
    engine = Engine(m, deterministic=True, drafter=Echo(m))
    engine.submit(request(max_tokens=150))
    for _ in range(pause):
        engine.step()
    (part,) = engine.pause()
    engine.resume()
    (rest,) = engine.run()
    assert 64 > len(part.tokens) > pause or pause > 40
    assert part.tokens + rest.tokens == plain.tokens
    assert part.logprobs + rest.logprobs == plain.logprobs


# ------------------------------------------------------------------------ memory


@pytest.mark.parametrize("kind", ["hybrid", "gqa"])
def test_after_every_step_a_row_has_one_slot_and_no_page_to_spare(kind):
    m = tiny.model(kind)
    engine = Engine(m, drafter=Echo(m, steps=5), max_batch=6)
    for i in range(6):
        engine.submit(request(f"r{i}", 5 + 3 * i, 40, i))
    while engine.busy:
        engine.step()
        engine.scheduler.check()
        assert all(len(r.pages) <= pages_for(r.filled + 1) for r in engine.scheduler.rows if r.pending == 1)


def test_where_memory_is_short_less_is_drafted_and_nobody_is_sent_back():
    """Four rows that fill the memory to its last page, in steps of one token or of many: no preemption, same text."""
    m = tiny.model("gqa")
    asked = [request(f"r{i}", 9, 23, i, sampling=GREEDY) for i in range(4)]
    tight = dict(pages=8, max_batch=4, prefix_cache=False)
    engine = Engine(m, drafter=Echo(m, steps=12, wrong=0), **tight)
    found, plain = run(engine, *asked), run(Engine(m, **tight), *asked)
    assert {n: c.tokens for n, c in found.items()} == {n: c.tokens for n, c in plain.items()}
    figures = engine.figures()
    assert figures["preemptions_total"] == 0 and figures["draft_accepted_total"] > 20
    assert engine.ledger.pages.size == 8


def test_draws_made_ahead_are_those_of_their_positions_when_rows_jump():
    rows = [Row.of(request(f"r{i}", 5 + i), "") for i in range(3)]
    for step in range(60):
        keys, positions = np.array([r.key for r in rows], np.uint64), np.array([r.length for r in rows], np.uint64)
        if step % 4 < 2:  # not every step asks
            assert draws(rows).tolist() == uniforms(keys, positions).tolist()
        for i, row in enumerate(rows):
            row.tokens += [1] * (i + 1 + step % 3)
            row.logprobs += [0.0] * (i + 1 + step % 3)


@pytest.mark.parametrize("cached", [True, False])
def test_a_long_row_that_is_sent_back_goes_on_with_the_draws_of_its_positions(cached):
    m = tiny.model("gqa")
    asked = [request(f"r{i}", 9, 120, i, sampling=Sampling(3.0)) for i in range(3)]
    tight = dict(deterministic=True, pages=18, prefix_cache=cached)
    engine = Engine(m, drafter=Echo(m), **tight)
    found = run(engine, *asked)
    assert engine.figures()["preemptions_total"] > 0
    for name, plain in run(Engine(m, deterministic=True), *asked).items():
        assert (found[name].tokens, found[name].logprobs) == (plain.tokens, plain.logprobs)


def test_a_page_that_a_draft_keeps_counts_toward_the_budget_of_the_cache():
    m = tiny.model("gqa")
    plain, drafting = Engine(m, cache_bytes=1 << 16), Engine(m, cache_bytes=1 << 16, drafter=Echo(m))
    assert drafting.cache.pages < plain.cache.pages


def test_new_weights_refresh_the_draft():
    m = tiny.model()
    drafter = Echo(m)
    engine = Engine(m, drafter=drafter)
    run(engine, request(hold=True))
    engine.load(1, tiny.model(seed=9).state_dict())
    assert drafter.refreshed == 1
    c = run(engine, request(max_tokens=20))["r"]  # the drafter checks that no feature is of the old weights
    assert c.policy_version == 1 and drafter.proposals


# ------------------------------------------------------------------------ counts


def test_a_request_says_what_was_drafted_and_accepted_by_position():
    m = tiny.model()
    engine = Engine(m, drafter=Echo(m, steps=3))
    done = run(engine, *[request(f"r{i}", 6, 25, i, sampling=GREEDY) for i in range(3)])
    figures, total = engine.figures(), Drafts()
    for name, c in done.items():
        d = engine.report(name).drafts
        assert d.proposed == sorted(d.proposed, reverse=True) and d.accepted == sorted(d.accepted, reverse=True)
        assert all(a <= p for a, p in zip(d.accepted, d.proposed, strict=True))
        assert (c.drafted_tokens, c.accepted_tokens) == (sum(d.proposed), sum(d.accepted))
        assert 1 + d.steps + sum(d.accepted) >= len(c.tokens) > d.steps
        assert 1 < d.acceptance_length <= 4
        total.add(d)
    assert figures["draft_proposed_total"] == sum(total.proposed)
    assert figures["draft_accepted_2_total"] == total.accepted[1]
    assert figures["draft_acceptance_length"] == total.acceptance_length


def test_a_perfect_draft_of_three_writes_four_tokens_a_step():
    class Perfect(Echo):
        def propose(self, pairs, most, choice):
            found = super().propose(pairs, most, choice)
            return replace(found, counts_B=torch.full_like(found.counts_B, most))

    m = tiny.model()
    engine = Engine(m, drafter=Perfect(m, steps=3, wrong=0))
    run(engine, request(max_tokens=41, sampling=GREEDY))  # the first comes with the prompt
    assert engine.report("r").drafts == Drafts(10, [10, 10, 10], [10, 10, 10])
    assert engine.decode_steps == 10


def test_without_a_drafter_nothing_is_said_about_drafts():
    engine = Engine(tiny.model())
    c = run(engine, request())["r"]
    assert (c.drafted_tokens, c.accepted_tokens) == (0, 0) and engine.report("r").drafts is None
    assert not [name for name in engine.figures() if name.startswith("draft")]


# ------------------------------------------------------------------------ what is refused, what is told


def test_a_draft_that_is_not_finite_is_one_sentence():
    class Broken(Echo):
        def _logits(self, texts):
            return super()._logits(texts) * torch.nan

    m = tiny.model()
    engine = Engine(m, drafter=Broken(m, sampled=True))
    engine.submit(request())
    with pytest.raises(UserError, match="the draft's logits are not finite"):
        engine.run()


def test_a_drafter_that_proposes_more_than_it_may_is_caught():
    class Eager(PromptLookup):
        def propose(self, pairs, most, choice):
            return Proposal(torch.zeros(len(pairs.known), most + 1, dtype=torch.long), torch.ones(len(pairs.known)))

    engine = Engine(tiny.model(), drafter=Eager())
    engine.submit(request())
    with pytest.raises(AssertionError, match="proposed more than it was asked for"):
        engine.run()


def test_the_first_divergence_comes_with_its_gap():
    m, r = tiny.model(), request(sampling=GREEDY)
    plain = run(Engine(m), r)["r"].tokens
    assert first_divergence(m, r.tokens, plain, plain) is None
    assert first_divergence(m, r.tokens, plain, plain[:5]) is None
    with torch.no_grad():
        logits = m.logits(m(torch.tensor([[*r.tokens, *plain[:4]]]))[0, -1])
    second = int(logits.topk(2).indices[1])
    found = first_divergence(m, r.tokens, plain, (*plain[:4], second, 1, 2))
    assert (found.position, found.expected, found.found) == (4, plain[4], second)
    assert found.gap == pytest.approx(float(logits[plain[4]] - logits[second])) and found.gap > 0
