"""Chunked prompts, preemption, pause and resume, new weights, and what the engine says about itself."""

from __future__ import annotations

import pytest
import tiny
import torch

from nonet.engine import Engine
from nonet.model import Model
from nonet.types import Completion, Request, Sampling, UserError

kinds = pytest.mark.parametrize("kind", tiny.KINDS)


def request(name: str = "r", length: int = 7, max_tokens: int = 9, seed: int = 0, **over) -> Request:
    return Request(name, tuple(tiny.tokens(length, seed=seed).tolist()), max_tokens, stream=f"{name}!", **over)


def run(engine: Engine, *requests: Request) -> dict[str, Completion]:
    for r in requests:
        engine.submit(r)
    return {c.id: c for c in engine.run()}


def alone(m: Model, *requests: Request) -> dict[str, Completion]:
    return run(Engine(m, deterministic=True, prefix_cache=False), *requests)


def plain(c: Completion) -> tuple:
    return c.tokens, c.logprobs, c.raw_logprobs, c.finish_reason


# ------------------------------------------------------------------------- chunks


@kinds
@pytest.mark.parametrize("chunk", [5, 16, 40])
def test_a_prompt_in_chunks_is_the_same_prompt(kind, chunk):
    m, asked = tiny.model(kind), [request(f"r{i}", 70 + i, seed=i) for i in range(3)]
    found = run(Engine(m, deterministic=True, chunk=chunk), *asked)
    assert {n: plain(c) for n, c in found.items()} == {n: plain(c) for n, c in alone(m, *asked).items()}


def test_a_long_prompt_does_not_stall_the_rows_that_decode():
    engine = Engine(tiny.model(), chunk=16)
    engine.submit(request("short", 5, 30))
    engine.step()
    engine.submit(request("long", 160, 4))
    for step in range(1, 11):
        engine.step()
        assert len(engine.written("short").tokens) == 1 + step
        assert len(engine.written("long").tokens) == (step == 10)


# ------------------------------------------------------------------------- preemption


@kinds
@pytest.mark.parametrize("cached", [True, False])
def test_rows_sent_back_for_want_of_pages_write_what_they_would_have_written(kind, cached):
    m = tiny.model(kind)
    engine = Engine(m, deterministic=True, pages=7, prefix_cache=cached)
    asked = [request(f"r{i}", 20 + i, 60, seed=i) for i in range(3)]
    found = run(engine, *asked)
    assert engine.figures()["preemptions_total"] > 0
    assert {n: plain(c) for n, c in found.items()} == {n: plain(c) for n, c in alone(m, *asked).items()}


def test_the_youngest_is_sent_back_and_finds_its_work_in_the_cache(monkeypatch):
    engine, fed = Engine(tiny.model("gqa"), pages=11), []
    forward = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, t, *a, **k: fed.append(t.numel()) or forward(self, t, *a))
    for i in range(2):
        engine.submit(request(f"r{i}", 20, 70, seed=i))
    assert [c.id for c in engine.run()] == ["r0", "r1"]
    assert engine.figures()["preemptions_total"] == 1
    assert fed == [40]  # both prompts, and then nothing but decoding: every page and the tail were still there


def test_what_the_memory_can_never_hold_is_refused_with_the_limit():
    engine = Engine(tiny.model(), pages=4)
    with pytest.raises(UserError, match=r"60 tokens \+ max_tokens 9 = 69 exceeds the engine's memory of 64 positions"):
        engine.submit(request(length=60))
    assert len(run(engine, request(length=55))["r"].tokens) == 9


# ------------------------------------------------------------------------- pause, resume


@kinds
def test_resume_finishes_what_pause_stopped(kind):
    m = tiny.model(kind)
    asked = [request(f"r{i}", 5 + 7 * i, 12, seed=i) for i in range(4)]
    engine, parts = Engine(m, deterministic=True, max_batch=2), {r.id: () for r in asked}
    for r in asked:
        engine.submit(r)
    while engine.busy:
        ended = [c for _ in range(3) for c in engine.step()]
        for c in [*ended, *engine.pause()]:
            parts[c.id] += c.tokens
        engine.resume()
    assert parts == {n: c.tokens for n, c in alone(m, *asked).items()}


def test_resumed_requests_start_from_what_they_had_computed():
    engine = Engine(tiny.model())
    engine.submit(request(length=40, max_tokens=20))
    for _ in range(6):
        engine.step()
    (partial,) = engine.pause()
    engine.resume()
    (c,) = engine.run()
    assert c.cached_tokens == 40 + len(partial.tokens) - 1
    engine.resume()  # nothing is left to resume
    assert not engine.busy


def test_a_request_submitted_again_by_hand_is_not_resumed_twice():
    engine, r = Engine(tiny.model()), request()
    engine.submit(r)
    engine.step()
    (partial,) = engine.pause()
    engine.submit(r.continued(partial))
    engine.resume()
    assert [c.id for c in engine.run()] == ["r"]


def test_penalties_and_stop_texts_reach_across_a_pause():
    m = tiny.model()
    how = Sampling(1.0, seed=3, presence_penalty=1.5, frequency_penalty=0.7)
    r = request(max_tokens=14, sampling=how, stop_texts=("#",))
    letters = lambda ids: "".join("#" if i == 0 else chr(97 + i % 26) for i in ids)  # noqa: E731
    whole = run(Engine(m, deterministic=True, decode=letters), r)["r"]
    engine, tokens = Engine(m, deterministic=True, decode=letters), ()
    engine.submit(r)
    while engine.busy:
        for c in [*engine.step(), *engine.pause()]:
            tokens += c.tokens
        engine.resume()
    assert tokens == whole.tokens


# ------------------------------------------------------------------------- weights


@kinds
def test_given_weights_are_copied_and_nothing_of_the_old_is_found(kind):
    old, new = tiny.model(kind, seed=0), tiny.model(kind, seed=50)
    engine, r = Engine(old, deterministic=True), request(length=40)
    run(engine, r)
    engine.load(1, new.state_dict())
    again = run(engine, r)["r"]
    assert plain(again) == plain(alone(new, r)["r"]) and (again.cached_tokens, again.policy_version) == (0, 1)
    assert engine.report("r").reason == "version"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("norm.weight"), "weights: norm.weight is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "weights: extra is not a tensor of this model"),
        (lambda w: w.update({"norm.weight": torch.zeros(3)}), r"weights: norm.weight is \[3\]; the model's is \[32\]"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(change, sentence):
    m, weights = tiny.model(), dict(tiny.model(seed=9).state_dict())
    change(weights)
    before, engine = {k: v.clone() for k, v in m.state_dict().items()}, Engine(m)
    with pytest.raises(UserError, match=sentence):
        engine.load(1, weights)
    assert engine.version == 0 and all(torch.equal(v, before[k]) for k, v in m.state_dict().items())


@kinds
def test_reuse_goes_on_from_what_older_weights_wrote_and_says_how_far_off_that_is(kind):
    m = tiny.model(kind)
    near = {k: v * 1.01 for k, v in m.state_dict().items()}
    engine, r = Engine(m), request(length=40, max_tokens=20)
    engine.submit(r)
    for _ in range(6):
        engine.step()
    (partial,) = engine.pause()
    engine.load(1, near, on_resume="reuse")
    engine.resume()
    other = request("other", 40)  # the same prompt from somebody else must not see old memory
    engine.submit(other)
    done = {c.id: c for c in engine.run()}
    assert done["r"].cached_tokens == 40 + len(partial.tokens) - 1 and done["other"].cached_tokens == 0
    assert done["r"].policy_version == 1
    figures = engine.figures()
    assert figures["mismatch_rows"] == 1 and 0 < figures["mismatch_mean"] < figures["mismatch_max"] < 5
    engine.load(2)
    assert engine.figures()["mismatch_rows"] == 0 and engine.figures()["pages_cached"] == 0


def test_reuse_under_the_same_weights_measures_next_to_nothing():
    engine = Engine(tiny.model())
    engine.submit(request(length=40, max_tokens=20))
    for _ in range(6):
        engine.step()
    engine.pause()
    engine.load(1, on_resume="reuse")
    engine.resume()
    engine.run()
    assert engine.figures()["mismatch_rows"] == 1 and engine.figures()["mismatch_max"] < 1e-4


def test_the_default_is_a_fresh_prefill():
    engine = Engine(tiny.model())
    engine.submit(request(length=40, max_tokens=20))
    for _ in range(6):
        engine.step()
    engine.pause()
    engine.load(1)
    engine.resume()
    assert engine.run()[0].cached_tokens == 0 and engine.figures()["mismatch_rows"] == 0


# ------------------------------------------------------------------------- requests


def test_stop_texts_end_a_completion_with_the_tokens_that_complete_them():
    m = tiny.model()
    letters = lambda ids: "".join(chr(97 + i % 26) for i in ids)  # noqa: E731
    free = run(Engine(m), request(max_tokens=12))["r"]
    stop = letters(free.tokens)[3:5]
    c = run(Engine(m, decode=letters), request(max_tokens=12, stop_texts=("never", stop)))["r"]
    at = letters(free.tokens).index(stop) + 2
    assert (c.tokens, c.finish_reason) == (free.tokens[:at], "stop")


def test_top_logprobs_are_the_models_own():
    m = tiny.model()
    r = request(max_tokens=3, top_logprobs=4, sampling=Sampling(0.3, top_k=2))
    c = run(Engine(m), r)["r"]
    with torch.no_grad():
        want = m.logits(m(torch.tensor([r.tokens + c.tokens[:2]]))[0, -3:]).log_softmax(-1).topk(4)
    assert [[t for t, _ in row] for row in c.top_logprobs] == want.indices.tolist()
    assert [[x for _, x in row] for row in c.top_logprobs] == [pytest.approx(v, abs=1e-4) for v in want.values.tolist()]


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (dict(stop_texts=("x",)), "stop_texts need an engine that can decode"),
        (dict(top_logprobs=62), "top_logprobs = 62; must be from 0 to 61"),
        (dict(boundaries=(3, 3)), r"boundaries = \(3, 3\); must ascend from 1 to at most 7"),
        (dict(boundaries=(8,)), "boundaries"),
        (dict(resumed=8), "resumed = 8; must be from 0 to 7"),
        (dict(sampling=Sampling(logit_bias=((61, 1.0),))), "logit_bias of token 61 outside the vocabulary of 61"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(over, sentence):
    engine = Engine(tiny.model())
    with pytest.raises(UserError, match=sentence):
        engine.submit(request(**over))
    assert not engine.busy


def test_an_empty_stop_text_is_refused():
    with pytest.raises(UserError, match="empty text"):
        Engine(tiny.model(), decode=str).submit(request(stop_texts=("",)))


def test_siblings_share_pages_and_copy_the_last():
    engine = Engine(tiny.model())
    for i in range(4):
        engine.submit(Request(f"s{i}", tuple(tiny.tokens(40).tolist()), 9, stream=f"s{i}"))
    engine.step()  # up to a snapshot
    engine.step()
    rows = engine.scheduler.rows
    assert len({tuple(r.pages[:2]) for r in rows}) == 1 and len({r.pages[2] for r in rows}) == 4
    assert len({r.slot for r in rows}) == 4
    assert len({c.tokens for c in engine.run()}) == 4


def test_figures_add_up():
    engine = Engine(tiny.model())
    done = run(engine, *[request(f"r{i}", 20 + i, 5, seed=i) for i in range(3)])
    f = engine.figures()
    assert f["requests_total"] == 3 and f["tokens_prompt_total"] == 63
    assert f["tokens_generated_total"] == sum(len(c.tokens) for c in done.values())
    assert f["pages_live"] == f["running"] == f["waiting"] == 0
    assert f["pages_free"] + f["pages_cached"] == engine.ledger.pages.size
