"""Law 4: pages and state slots are conserved under any seeded schedule with preemption."""

from __future__ import annotations

import pytest
import tiny
from engine_programs import SMALL, TIGHT, Program, weights

from nonet.engine import Engine

TWO = dict(layers=2, mixers=("kda", "mla"))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("first", range(200, 240, 10))
def test_after_every_operation_each_page_and_slot_is_free_cached_or_a_rows(first, cached):
    versions = weights("hybrid", **TWO)
    preempted = 0
    for seed in range(first, first + 10):
        engine = Engine(tiny.model("hybrid", **{**SMALL, **TWO}), prefix_cache=cached, **TIGHT)
        for _ in Program(engine, versions, seed).run():
            engine.scheduler.check()
        assert not engine.busy
        assert engine.ledger.pages.size <= TIGHT["pages"] and engine.ledger.slots.size <= TIGHT["max_batch"]
        preempted += int(engine.figures()["preemptions_total"])
        engine.load(99)  # nothing is in flight and the cache is forgotten
        assert sorted(engine.ledger.pages.free) == list(range(engine.ledger.pages.size))
        assert sorted(engine.ledger.slots.free) == list(range(engine.ledger.slots.size))
    assert preempted, "the programs never ran out of pages"


def test_a_lost_page_is_named():
    engine = Engine(tiny.model("hybrid", **{**SMALL, **TWO}))
    program = Program(engine, weights("hybrid", **TWO), 0)
    program.submit()
    program.steps()
    engine.ledger.pages.share(engine.scheduler.rows[0].pages[0])
    with pytest.raises(AssertionError, match=r"pages \[0\] have \[\d\] owners"):
        engine.scheduler.check()


def test_memory_stays_what_the_busiest_moment_needed():
    """A thousand requests, a tenth aborted: nothing leaks and nothing grows."""
    engine, sizes = Engine(tiny.model("hybrid", **{**SMALL, **TWO}), max_batch=8, snapshots=8, cache_bytes=1 << 14), []
    program = Program(engine, weights("hybrid", **TWO), 1)
    for round_ in range(50):
        for _ in range(20):
            program.submit()
        for _ in range(2):
            program.abort()
        program.finish()
        if round_ >= 5:
            sizes.append(engine.figures()["memory_bytes"])
    assert len(program.done) + len(program.aborted) == 1000
    assert len(set(sizes)) == 1
