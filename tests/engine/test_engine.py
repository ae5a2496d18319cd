"""The engine's door: exact log-probs, honest partials, budgets, stops, and memory that never outlives its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import tiny
import torch

from nonet.engine import Engine
from nonet.model import Model
from nonet.types import Completion, Request, Sampling, UserError

EOS = 60
kinds = pytest.mark.parametrize("kind", tiny.KINDS)


def request(name: str = "r", length: int = 7, max_tokens: int = 9, seed: int = 0, **over) -> Request:
    prompt = tuple(tiny.tokens(length, seed=seed).tolist())
    return Request(**{"id": name, "tokens": prompt, "max_tokens": max_tokens, "stream": f"{name}!", **over})


def run(model: Model, *requests: Request, **over) -> dict[str, Completion]:
    engine = Engine(model, **over)
    for r in requests:
        engine.submit(r)
    return {c.id: c for c in engine.run()}


def full_logprobs(
    model: Model, prompt: Sequence[int], written: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the written tokens by one fresh forward over everything."""
    tokens = torch.tensor([[*prompt, *written]])
    with torch.no_grad():
        logits = model.logits(model(tokens))[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(written)[:, None])[:, 0]


def assert_same(a: Completion, b: Completion, tolerance: float = 1e-4) -> None:
    assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
    assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)
    assert a.raw_logprobs == pytest.approx(b.raw_logprobs, abs=tolerance)


# ------------------------------------------------------------------------- exactness


@kinds
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 5e-6), (torch.float32, 1e-4)])
def test_every_logprob_is_that_of_a_fresh_full_forward(kind, deterministic, dtype, bound):
    """trl#4159: the sampler's log-probs at a temperature other than 1 are those of that temperature."""
    m = tiny.model(kind, dtype=dtype)
    asked = [request(f"r{t}", 3 + i, 8, seed=i, sampling=Sampling(t, seed=i)) for i, t in enumerate((1.0, 0.6, 1.7))]
    for name, c in run(m, *asked, deterministic=deterministic).items():
        r = next(r for r in asked if r.id == name)
        expected = full_logprobs(m, r.tokens, c.tokens, r.sampling.temperature).float()
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=bound)
        plain = full_logprobs(m, r.tokens, c.tokens).float()
        torch.testing.assert_close(torch.tensor(c.raw_logprobs), plain, rtol=0, atol=bound)


@kinds
def test_greedy_writes_the_argmax_of_a_fresh_forward_at_every_position(kind):
    m, r = tiny.model(kind), request(sampling=Sampling(0.0))
    context = list(r.tokens)
    for token in run(m, r)["r"].tokens:
        with torch.no_grad():
            assert token == int(m.logits(m(torch.tensor([context]))[0, -1]).argmax())
        context.append(token)


@kinds
def test_the_deterministic_mode_is_the_same_map(kind):
    m = tiny.model(kind)
    asked = [request(f"r{i}", 2 + 3 * i, 6 + i, seed=i) for i in range(4)]
    fast, slow = run(m, *asked), run(m, *asked, deterministic=True)
    for name in fast:
        assert_same(fast[name], slow[name])


# ------------------------------------------------------------------ saved prefill is invisible


@kinds
def test_equal_prompts_computed_once_give_what_separate_ones_give(kind):
    m = tiny.model(kind)
    asked = [request(f"r{i}", 7, 8, seed=i % 2) for i in range(6)]
    together = run(m, *asked)
    for r in asked:
        assert_same(together[r.id], run(m, r)[r.id])
    assert len({c.tokens for c in together.values()}) > 2  # siblings drew from their own streams


def test_equal_prompts_really_are_computed_once(monkeypatch):
    m, fed = tiny.model(), []
    forward = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, t, *a, **k: fed.append(tuple(t.shape)) or forward(self, t, *a))
    run(m, *[request(f"r{i}", 7, 2) for i in range(5)], native=False)
    assert fed == [(1, 7), (5, 1)]


def next_turn(first: Request, c: Completion, more: int = 5, **over) -> Request:
    """The request of the same id after the environment answered with `more` tokens."""
    heard = tuple(tiny.tokens(more, seed=99).tolist())
    return Request(first.id, first.tokens + c.tokens + heard, over.pop("max_tokens", 6), stream=first.stream, **over)


@kinds
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_held_state_continues_as_a_new_prefill_would(kind, deterministic):
    m = tiny.model(kind)
    first = [request(f"r{i}", 4 + 3 * i, 5 + i, seed=i, hold=True) for i in range(3)]
    engine = Engine(m, deterministic=deterministic)
    for r in first:
        engine.submit(r)
    done = {c.id: c for c in engine.run()}
    again = [next_turn(r, done[r.id], 3 + i) for i, r in enumerate(first)]
    for r in again:
        engine.submit(r)
    reused, cold = {c.id: c for c in engine.run()}, run(m, *again, deterministic=deterministic)
    for name in reused:
        assert_same(reused[name], cold[name], 0 if deterministic else 1e-4)


def test_a_held_state_is_really_used_and_only_by_requests_that_extend_it(monkeypatch):
    m, engine, fed = tiny.model(), Engine(tiny.model()), []
    forward = Model.forward
    first = request(hold=True)
    engine.submit(first)
    (done,) = engine.run()
    monkeypatch.setattr(Model, "forward", lambda self, t, *a, **k: fed.append(t.shape[1]) or forward(self, t, *a))
    r = next_turn(first, done, 5, hold=True)
    engine.submit(r)
    engine.run()
    assert fed[0] == 6  # the last sampled token and five new ones
    other = request("r", 30, 3, seed=5)
    fed.clear()
    engine.submit(other)
    (c,) = engine.run()
    assert fed[:2] == [16, 14]  # nothing of it is remembered; a snapshot is taken on the way
    assert_same(c, run(m, other)["r"])


def test_a_weight_change_between_turns_leaves_nothing_of_the_old_weights():
    """NeMo-RL#4018, SkyRL#2246: the same prompt before and after an update must equal a cold run, held state or not."""
    old, new = tiny.model(seed=0), tiny.model(seed=50)
    shared = copy.deepcopy(old)
    engine = Engine(shared)
    first = request(hold=True)
    engine.submit(first)
    (done,) = engine.run()
    shared.load_state_dict(new.state_dict())
    engine.load(1)
    again, same = next_turn(first, done), request("other")
    for r in (again, same):
        engine.submit(r)
    warm, cold = {c.id: c for c in engine.run()}, run(new, again, same)
    for name in warm:
        assert_same(warm[name], cold[name])
        assert warm[name].policy_version == 1
    assert warm["other"].tokens != run(old, same)["other"].tokens


def test_loading_while_requests_are_in_flight_is_refused():
    engine = Engine(tiny.model())
    engine.submit(request())
    with pytest.raises(RuntimeError, match="pause"):
        engine.load(1)
    engine.step()
    engine.pause()
    engine.load(1)
    assert engine.version == 1


# ------------------------------------------------------------------------ pause, abort


def test_a_pause_hands_back_everything_in_order_of_arrival_with_exactly_what_was_written():
    m = tiny.model()
    asked = [request(f"r{i}", 3 + i, 2 if i == 0 else 20, seed=i) for i in range(5)]
    engine = Engine(m, max_batch=4)
    for r in asked:
        engine.submit(r)
    ended = [c for _ in range(5) for c in engine.step()]
    assert [c.id for c in ended] == ["r0"]
    partial = engine.pause()
    assert [c.id for c in partial] == ["r1", "r2", "r3", "r4"]
    assert not engine.busy
    assert engine.step() == []
    whole = run(m, *asked)
    for c in partial:
        n = len(c.tokens)
        assert (c.finish_reason, c.policy_version) == ("paused", 0)
        assert c.tokens == whole[c.id].tokens[:n]
        assert c.logprobs == pytest.approx(whole[c.id].logprobs[:n], abs=1e-4)
        assert len(c.logprobs) == len(c.raw_logprobs) == n
    *first, last = [len(c.tokens) for c in partial]
    assert first == [5, 5, 5] and last < 5  # r4 had to wait for r0's row


def test_a_request_that_never_ran_comes_back_empty():
    engine = Engine(tiny.model())
    engine.submit(request())
    (c,) = engine.pause()
    assert c == Completion("r", (), (), (), "paused", 0)


def test_continued_shrinks_the_budget_by_what_was_written():
    """slime#2260: max_new 24,576 with 19,202 used must leave 5,374, not the whole budget again."""
    paused = Completion("r", (1,) * 19_202, (0.0,) * 19_202, (0.0,) * 19_202, "paused", 0)
    r = Request("r", (5, 6), 24_576, hold=True, stream="s", sampling=Sampling(0.5, seed=3), stop_ids=(9,))
    more = r.continued(paused)
    assert more.max_tokens == 5_374
    assert more.tokens == r.tokens + paused.tokens
    assert len(more.tokens) + more.max_tokens == len(r.tokens) + r.max_tokens
    assert (more.id, more.stream, more.sampling, more.stop_ids, more.hold) == (
        r.id,
        r.stream,
        r.sampling,
        r.stop_ids,
        r.hold,
    )


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_forgets_one_request_and_disturbs_no_other(victim, steps):
    m = tiny.model()
    asked = [request(f"r{i}", 3 + i, 9, seed=i) for i in range(4)]
    engine = Engine(m, max_batch=3)
    for r in asked:
        engine.submit(r)
    for _ in range(steps):
        engine.step()
    engine.abort(f"r{victim}")
    done = {c.id: c for c in engine.run()}
    assert sorted(done) == sorted({f"r{i}" for i in range(4)} - {f"r{victim}"})
    for name, c in done.items():
        assert_same(c, run(m, next(r for r in asked if r.id == name))[name])


def test_abort_of_the_last_request_leaves_an_idle_engine():
    engine = Engine(tiny.model())
    engine.submit(request())
    engine.step()
    engine.abort("r")
    engine.abort("never seen")
    assert not engine.busy
    engine.submit(request("s"))
    assert_same(engine.run()[0], run(tiny.model(), request("s"))["s"])


# --------------------------------------------------------------------------- stops, budgets


@pytest.mark.parametrize("stops", [(3,), (3, 17), tuple(range(0, 61, 2))])
def test_any_of_several_stop_ids_ends_a_completion_and_stays_in_it(stops):
    """trl#7039: only one EOS id was honoured."""
    m = tiny.model()
    asked = [request(f"r{i}", 5, 40, seed=i, stop_ids=stops) for i in range(8)]
    free = run(m, *[request(f"r{i}", 5, 40, seed=i) for i in range(8)])
    reasons = set()
    for name, c in run(m, *asked).items():
        reasons.add(c.finish_reason)
        cut = next((i for i, t in enumerate(free[name].tokens) if t in stops), None)
        assert c.finish_reason == ("length" if cut is None else "stop")
        assert c.tokens == (free[name].tokens if cut is None else free[name].tokens[: cut + 1])
        assert all(t not in stops for t in c.tokens[:-1])
    assert "stop" in reasons


def test_a_stop_id_inside_the_prompt_stops_nothing():
    """trl#6357, #7039: the mask was inferred from ids, so an EOS in the prompt (or pad == eos) cut completions."""
    m = tiny.model()
    r = Request("r", (0, EOS, 5, EOS), 6, stop_ids=(EOS, 0), stream="r!")
    c = run(m, r)["r"]
    free = run(m, Request("r", (0, EOS, 5, EOS), 6, stream="r!"))["r"]
    assert c.tokens == free.tokens[: len(c.tokens)]
    assert len(c.tokens) > 1


def test_padding_with_the_stop_id_is_never_mistaken_for_it():
    """Rows are padded with id 0 inside the engine; id 0 as EOS must not matter to longer or shorter prompts."""
    m = tiny.model()
    asked = [request(f"r{i}", 2 + 5 * i, 12, seed=i, stop_ids=(0,)) for i in range(4)]
    together = run(m, *asked)
    for r in asked:
        assert_same(together[r.id], run(m, r)[r.id])


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop():
    m = tiny.model()
    free = run(m, request(max_tokens=5))["r"]
    c = run(m, request(max_tokens=5, stop_ids=(free.tokens[-1],)))["r"]
    first = free.tokens.index(free.tokens[-1])
    assert (c.finish_reason, len(c.tokens)) == ("stop", first + 1)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 7])
def test_every_request_gets_exactly_its_budget_whatever_the_batch(max_batch):
    asked = [request(f"r{i}", 3 + i % 3, 1 + i, seed=i) for i in range(7)]
    done = run(tiny.model(), *asked, max_batch=max_batch)
    assert {n: len(c.tokens) for n, c in done.items()} == {r.id: r.max_tokens for r in asked}
    assert {c.finish_reason for c in done.values()} == {"length"}


def test_what_is_written_so_far_can_be_read_while_it_is_written():
    engine, seen = Engine(tiny.model()), []
    engine.submit(request(max_tokens=4))
    assert engine.written("r") == Completion("r", (), (), (), "running", 0)
    while not (done := engine.step()):
        seen.append(engine.written("r"))
    assert [w.tokens for w in seen] == [done[0].tokens[: n + 1] for n in range(3)]
    assert [w.logprobs for w in seen] == [done[0].logprobs[: n + 1] for n in range(3)]
    assert engine.written("r") is None and engine.written("unknown") is None


def test_what_is_written_since_a_position():
    engine = Engine(tiny.model())
    engine.submit(request(max_tokens=6))
    for _ in range(4):
        engine.step()
    whole, rest = engine.written("r"), engine.written("r", 3)
    assert rest.tokens == whole.tokens[3:] and rest.raw_logprobs == whole.raw_logprobs[3:] and len(rest.tokens) == 1


def test_an_aborted_request_says_what_it_wrote():
    engine = Engine(tiny.model())
    engine.submit(request(max_tokens=6))
    for _ in range(3):
        engine.step()
    written, ended = engine.written("r"), engine.abort("r")
    assert ended is not None and ended.finish_reason == "aborted"
    assert (ended.tokens, ended.logprobs) == (written.tokens, written.logprobs) and len(ended.tokens) == 3
    assert engine.abort("r") is None and not engine.busy


def test_decode_steps_are_counted():
    engine = Engine(tiny.model())
    engine.submit(request(max_tokens=6))
    engine.run()
    assert engine.decode_steps == 5  # the first token comes with the prefill


# -------------------------------------------------------------------------- impossible requests


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (dict(tokens=()), "request r: no tokens; a completion needs at least one token of context"),
        (dict(max_tokens=0), "request r: max_tokens = 0; must be at least 1"),
        (dict(max_tokens=40), "request r: 7 tokens + max_tokens 40 = 47 exceeds the model's 46 positions"),
        (dict(tokens=(5, 61)), "request r: token id 61 outside the vocabulary of 61"),
        (dict(tokens=(5, -1)), "request r: token id -1 outside the vocabulary of 61"),
    ],
)
def test_impossible_requests_are_one_sentence_and_leave_the_engine_idle(over, sentence):
    engine = Engine(tiny.model(max_position=46))
    with pytest.raises(UserError) as caught:
        engine.submit(request(**over))
    assert str(caught.value) == sentence
    assert not engine.busy


def test_a_request_may_use_the_very_last_position():
    c = run(tiny.model(max_position=16), request(max_tokens=9))["r"]
    assert len(c.tokens) == 9


def test_an_id_that_is_already_in_flight_is_refused():
    """Two live requests of one id could not be told apart: their completions, held states and abort would mix."""
    engine = Engine(tiny.model())
    engine.submit(request())
    with pytest.raises(UserError, match="request r: "):
        engine.submit(request(seed=1))
    engine.step()
    with pytest.raises(UserError, match="request r: "):
        engine.submit(request(seed=1))
    assert len(engine.run()) == 1
    engine.submit(request(seed=1))
    assert len(engine.run()) == 1
