"""What users of other hybrid engines complain about, each a scenario that must come out right here.

Rows about drafts (vllm#53912, #47194, #53505, #39809, sglang#36537, club-3090#1323) stand at the end, and as far as
they concern memory alone also before it.
"""

from __future__ import annotations

import pytest
import tiny
import torch
from drafters import Echo

from nonet.engine import Engine
from nonet.model import Model
from nonet.types import Completion, Request, Sampling

VOCAB = 61
TWO = dict(layers=2, mixers=("kda", "mla"))
hybrids = pytest.mark.parametrize("kind", ["hybrid", "k3", "kimi_linear"])


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(tiny.tokens(count, vocab=VOCAB, seed=seed).tolist())


def ask(engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int = 6, **over) -> Completion:
    engine.submit(Request(name, prompt, max_tokens, stream=str(len(prompt)), **over))
    return next(c for c in engine.run() if c.id == name)


def cold(model: Model, prompt: tuple[int, ...], max_tokens: int = 6, **over) -> Completion:
    return ask(Engine(model, deterministic=True, prefix_cache=False), "x", prompt, max_tokens, **over)


def exact(model: Model) -> Engine:
    return Engine(model, deterministic=True)


def same(a: Completion, b: Completion) -> bool:
    return (a.tokens, a.logprobs, a.raw_logprobs) == (b.tokens, b.logprobs, b.raw_logprobs)


# ------------------------------------------------------------------------- it hits at all


@hybrids
@pytest.mark.parametrize("length", [17, 40, 100, 527])
def test_vllm_40696_prompts_of_any_length_hit(kind, length):
    engine, prompt = Engine(tiny.model(kind)), words(length)
    ask(engine, "a", prompt)
    assert ask(engine, "b", prompt).cached_tokens == (length - 1) // 16 * 16


@hybrids
def test_vllm_51198_an_identical_prompt_of_561_tokens_hits(kind):
    engine, prompt = Engine(tiny.model(kind)), words(561)
    ask(engine, "a", prompt)
    assert ask(engine, "b", prompt).cached_tokens == 560
    assert engine.report("a").reason == "cold" and engine.report("b").reason == ""
    assert engine.figures()["tokens_cached_total"] == 560


def test_an_engine_without_a_cache_says_so():
    engine, prompt = Engine(tiny.model(), prefix_cache=False), words(40)
    ask(engine, "a", prompt)
    assert ask(engine, "b", prompt).cached_tokens == 0
    assert engine.report("b").reason == "off" and engine.figures()["miss_off_total"] == 2


@hybrids
def test_llamacpp_20225_no_turn_of_a_conversation_is_processed_again(kind):
    engine, said = Engine(tiny.model(kind)), words(30)
    for turn in range(6):
        c = ask(engine, f"t{turn}", said, max_tokens=9)
        assert c.cached_tokens == (0 if turn == 0 else len(said) - 7 - 1), turn  # all but the last answer's last token
        said += c.tokens + words(7, seed=turn)


# ------------------------------------------------------------------------- what hits is right


@hybrids
def test_omlx_2496_the_second_turn_has_its_kda_state(kind):
    m = tiny.model(kind)
    engine, first = exact(m), words(37)
    c = ask(engine, "a", first)
    second = first + c.tokens + words(9, seed=1)
    again = ask(engine, "b", second)
    assert again.cached_tokens == len(first) + len(c.tokens) - 1
    assert same(again, cold(m, second))


@hybrids
def test_llamacpp_26185_partial_reuse_answers_the_new_context(kind):
    """A prompt that leaves the cached one in the middle, on every side of a page's edge."""
    m = tiny.model(kind, **(TWO if kind == "hybrid" else {}))
    engine, prompt = exact(m), words(60)
    ask(engine, "a", prompt, boundaries=(20, 60))
    for cut in (15, 16, 17, 31, 32, 33, 48, 59):
        other = prompt[:cut] + words(12, seed=cut)
        assert same(ask(engine, f"b{cut}", other), cold(m, other)), cut


@hybrids
def test_vllm_55601_pages_and_slots_are_addressed_by_their_own_sizes(kind):
    """Many rows, ragged, in scattered pages and slots, hit at different depths."""
    m = tiny.model(kind)
    engine = Engine(m, deterministic=True, max_batch=5)
    base = words(70)
    prompts = [base[: 9 * i + 5] + words(3, seed=i) for i in range(7)]
    for wave in range(2):
        for i, p in enumerate(prompts):
            engine.submit(Request(f"{wave}/{i}", p, 5, stream=str(len(p))))
        done = {c.id: c for c in engine.run()}
        assert all(same(done[f"{wave}/{i}"], cold(m, p, 5)) for i, p in enumerate(prompts))
        assert wave == 0 or sum(c.cached_tokens for c in done.values()) > 100


@hybrids
def test_sglang_30862_a_snapshot_holds_what_was_computed(kind):
    m = tiny.model(kind)
    engine, prompt = exact(m), words(50)
    ask(engine, "a", prompt)
    shelf = engine.cache.snapshots.shelf.memory
    taken = [s.slot for s in engine.cache.snapshots.kept]
    pools = [layer["matrix"][taken] for layer in shelf.layers if "matrix" in layer]
    assert pools and all(bool(pool.abs().sum((1, 2, 3)).gt(0).all()) for pool in pools)
    assert same(ask(engine, "b", prompt), cold(m, prompt))


@hybrids
def test_tpu_3358_a_hit_never_reads_another_requests_slot(kind):
    """Two conversations through one slot, interleaved; then both at once."""
    m = tiny.model(kind)
    engine = Engine(m, deterministic=True, max_batch=1)
    a, b = words(40, seed=1), words(40, seed=2)
    for turn in range(3):
        for name in "ab":
            prompt = (a if name == "a" else b) + words(5 * turn, seed=turn)
            assert same(ask(engine, f"{name}{turn}", prompt), cold(m, prompt))
    wide = exact(m)
    for p in (a, b):
        wide.submit(Request(f"{p[0]}w", p, 6, stream="40"))
    assert all(same(c, cold(m, a if c.id == f"{a[0]}w" else b)) for c in wide.run())


def test_a_used_slot_starts_a_new_sequence_from_zero():
    engine = Engine(tiny.model(), deterministic=True, max_batch=1, prefix_cache=False)
    ask(engine, "a", words(30, seed=1))
    assert same(ask(engine, "b", words(30)), cold(tiny.model(), words(30)))


# ------------------------------------------------------------------------- memory under pressure


@hybrids
def test_sglang_34441_pages_and_snapshots_make_room_for_each_other(kind):
    """Neither pages without snapshots nor snapshots with tails in pages keep a request from running."""
    m = tiny.model(kind)
    engine = Engine(m, deterministic=True, pages=8, snapshots=3, max_batch=2)
    for i in range(12):
        prompt = words(40 + 5 * i, seed=i)
        assert same(ask(engine, f"r{i}", prompt), cold(m, prompt))
    assert engine.ledger.pages.size == 8 and engine.figures()["snapshots"] <= 3
    assert engine.report("r11").reason in ("cold", "evicted")


@hybrids
def test_club_3090_1323_snapshots_do_not_take_the_rows_slots(kind):
    """Whatever is kept, max_batch rows run at once."""
    engine = Engine(tiny.model(kind), max_batch=6, snapshots=4)
    for wave in range(2):
        for i in range(6):
            engine.submit(Request(f"{wave}/{i}", words(20 + i, seed=i), 8))
        engine.step()
        assert engine.figures()["running"] == 6
        engine.run()


@hybrids
def test_vllm_53912_many_readers_of_one_snapshot_each_write_their_own(kind):
    """What a draft would do too: several continuations from one remembered state, at once, step by step."""
    m = tiny.model(kind)
    engine, prompt = exact(m), words(45)
    ask(engine, "a", prompt)
    before = [{k: v.clone() for k, v in layer.items()} for layer in engine.cache.snapshots.shelf.memory.layers]
    kept = list(engine.cache.snapshots.kept)
    asked = [Request(f"b{i}", prompt + words(i, seed=i), 9, stream=f"s{i}") for i in range(4)]
    alone = Engine(m, deterministic=True, prefix_cache=False)
    for r in asked:
        engine.submit(r)
        alone.submit(r)
    want = {c.id: c for c in alone.run()}
    assert all(same(c, want[c.id]) and c.cached_tokens == 32 for c in engine.run())
    after = engine.cache.snapshots.shelf.memory.layers
    for snapshot in kept:
        for old, new in zip(before, after, strict=True):
            for name in old.keys() & {"matrix", "tail"}:
                assert torch.equal(old[name][snapshot.slot], new[name][snapshot.slot])


@hybrids
def test_vllm_53505_a_match_of_nothing_changes_nothing(kind):
    m = tiny.model(kind)
    engine, prompt = exact(m), words(33)
    ask(engine, "other", words(50, seed=9))
    assert ask(engine, "a", prompt).cached_tokens == 0
    assert same(ask(exact(m), "a", prompt), cold(m, prompt))


# ------------------------------------------------------------------------- why it missed


def test_every_miss_has_a_reason():
    m = tiny.model()
    engine, prompt = Engine(m, snapshots=2, cache_bytes=1 << 13), words(90)
    ask(engine, "cold", prompt, hold=True)
    ask(engine, "snapshot", prompt[:60] + words(5, seed=1), hold=True)
    for i in range(6):
        ask(engine, f"fill{i}", words(90, seed=10 + i))
    ask(engine, "evicted", prompt)
    engine.load(1)
    ask(engine, "version", prompt)
    reports = {name: engine.report(name) for name in ("cold", "snapshot", "evicted", "version")}
    assert {name: r.reason for name, r in reports.items()} == {name: name for name in reports}
    assert reports["snapshot"].paged == 48 and reports["snapshot"].cached == 0 and reports["snapshot"].snapshot == -1
    assert engine.figures()["miss_snapshot_total"] == 1
    assert engine.report("cold") is None  # read once


def test_a_junction_is_remembered_from_the_second_touch_on():
    """Pages without a snapshot are replayed once; the third request starts where the first two parted."""
    engine, base = Engine(tiny.model()), words(70)
    found = [ask(engine, f"r{i}", base[:50] + words(20, seed=i), hold=True).cached_tokens for i in range(3)]
    assert found == [0, 0, 48]


def test_a_bfloat16_snapshot_is_half_the_size_and_nearly_the_same():
    m, prompt = tiny.model(), words(50)
    whole, half = Engine(m), Engine(m, snapshot_dtype=torch.bfloat16)
    for engine in (whole, half):
        ask(engine, "a", prompt)
    assert half.cache.snapshots.shelf.memory.bytes * 2 == whole.cache.snapshots.shelf.memory.bytes
    again = ask(half, "b", prompt, 1, sampling=Sampling(0.0))
    want = cold(m, prompt, 1, sampling=Sampling(0.0))
    assert again.tokens == want.tokens and again.raw_logprobs[0] == pytest.approx(want.raw_logprobs[0], abs=0.02)
    assert again.cached_tokens == 48


# ------------------------------------------------------------------------- under speculation


def drafted(c: Completion) -> bool:
    return 0 < c.accepted_tokens < c.drafted_tokens


@hybrids
def test_vllm_53912_a_conversation_with_cache_and_draft_is_one_without_either(kind):
    """Five turns; the draft checks on the way that what it finds in shared pages is what it would have made."""
    m = tiny.model(kind)
    engine, said, hits, used = Engine(m, deterministic=True, drafter=Echo(m)), words(37), 0, 0
    for turn in range(5):
        c = ask(engine, f"t{turn}", said, max_tokens=14)
        assert same(c, cold(m, said, 14)), turn
        hits, used = hits + c.cached_tokens, used + drafted(c)
        said += c.tokens + words(6, seed=turn)
    assert hits > 200 and used


@hybrids
def test_vllm_47194_a_hit_under_a_draft_of_three_recalls_what_a_miss_recalls(kind):
    m = tiny.model(kind)
    engine, prompt = Engine(m, deterministic=True, drafter=Echo(m, steps=3, wrong=0.1)), words(100)
    first = ask(engine, "miss", prompt, max_tokens=30, sampling=Sampling(0.0))
    again = ask(engine, "hit", prompt, max_tokens=30, sampling=Sampling(0.0))
    assert (first.cached_tokens, again.cached_tokens) == (0, 96) and first.accepted_tokens and again.accepted_tokens
    assert same(first, again) and same(again, cold(m, prompt, 30, sampling=Sampling(0.0)))


@hybrids
def test_vllm_53505_under_a_draft_a_match_of_nothing_changes_nothing(kind):
    m = tiny.model(kind)
    engine, prompt = Engine(m, deterministic=True, drafter=Echo(m)), words(33)
    ask(engine, "other", words(50, seed=9), max_tokens=20)
    c = ask(engine, "a", prompt, max_tokens=20)
    assert c.cached_tokens == 0 and drafted(c) and same(c, cold(m, prompt, 20))


@hybrids
def test_vllm_39809_every_row_of_a_full_batch_has_the_slots_its_drafts_need(kind):
    """And they are given back: what speculates owns no more slots between steps than what does not."""
    m = tiny.model(kind)
    engine = Engine(m, drafter=Echo(m, steps=7, wrong=0), max_batch=5, snapshots=3)
    for i in range(5):
        engine.submit(Request(f"r{i}", words(20 + i, seed=i), 30, sampling=Sampling(0.0), stream=str(i)))
    while engine.busy:
        engine.step()
        slots = engine.ledger.slots
        assert sum(n > 0 for n in slots.owners) == len(engine.scheduler.rows) and slots.size <= 5 * 8
    assert engine.figures()["draft_accepted_total"] > 40


@hybrids
def test_sglang_36537_nothing_breaks_when_most_of_the_memory_is_in_use(kind):
    """A memory that eight speculating rows fill to the last page, with snapshots beside them."""
    m = tiny.model(kind)
    engine = Engine(m, deterministic=True, pages=24, max_batch=8, snapshots=6, drafter=Echo(m, steps=4, wrong=0.1))
    asked = [Request(f"r{i}", words(25 + 3 * i, seed=i), 20, sampling=Sampling(0.0), stream="") for i in range(8)]
    for r in asked:
        engine.submit(r)
    done, fullest = {}, 0.0
    while engine.busy:
        done |= {c.id: c for c in engine.step()}
        fullest = max(fullest, engine.figures()["pages_live"] / 24)
    assert fullest > 0.9 and engine.figures()["preemptions_total"] > 0
    assert all(same(done[r.id], cold(m, r.tokens, 20, sampling=r.sampling)) for r in asked)
    assert any(drafted(c) for c in done.values())


@hybrids
def test_club_3090_1323_drafts_do_not_take_the_rows_slots(kind):
    m = tiny.model(kind)
    engine = Engine(m, max_batch=6, snapshots=4, drafter=Echo(m, steps=6))
    for i in range(6):
        engine.submit(Request(f"r{i}", words(20 + i, seed=i), 30))
    for _ in range(3):
        engine.step()
        assert engine.figures()["running"] == 6
    engine.run()
