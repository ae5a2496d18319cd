"""The arithmetic of `nonet bench partial`, and the scripted lengths."""

from __future__ import annotations

import math
from statistics import median

import pytest
import tiny

from nonet.bench import partial
from nonet.bench.partial_lab import CAP, MEDIAN, SHORT, Cell, Tailed
from nonet.types import Request, UserError


def point(**over) -> dict:
    same = dict(groups=4, decode_steps=96, prefilled=512, trained_tokens=100, age_mean=0.0, age_max=0)
    return {**same, "wall": 2.0, "cpu": 1.0, "reward": 0.5, **over}


def test_the_accelerators_clock_counts_steps_prompts_and_updates():
    assert partial.ticks([point()], "accelerator", [point()]) == [96 + 1 + 4]
    assert partial.rate([point(), point(groups=0)], "accelerator", [point()]) == 4 / 202


def test_under_busy_updates_a_synchronous_update_takes_its_share():
    synchronous = [point(), point(trained_tokens=300)]
    took = partial.ticks(synchronous, "busy update", synchronous)
    assert 1 - 2 * 97 / sum(took) == pytest.approx(partial.BUSY)
    (other,) = partial.ticks([point(trained_tokens=0)], "busy update", synchronous)
    assert other == 97


def test_reward_is_compared_at_equal_time():
    slow, fast = [(10.0, 0.1), (20.0, 0.2)], [(5.0, 0.3), (10.0, 0.4), (15.0, 0.5), (20.0, 0.6)]
    found = partial.equal_time([(fast, slow)])
    assert found["0.5"] == {"reward": pytest.approx(0.35), "over synchronous": {"mean": pytest.approx(0.25)}}
    assert found["1.0"]["reward"] == pytest.approx(0.5)


def test_equal_ratios_have_no_spread():
    assert partial.across([1.0, 1.0, 1.0]) == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_every_fraction_trains_about_the_same_number_of_groups():
    for fraction in partial.FRACTIONS:
        cell = Cell("tail", fraction, 0, SHORT)
        assert SHORT.rounds <= cell.steps * fraction < SHORT.rounds + 1


def test_scripted_lengths_have_a_heavy_tail_and_survive_pauses():
    engine = Tailed(tiny.model("gqa"), seed=3, budget=MEDIAN * CAP, max_batch=4)
    lengths = [engine.length(f"task#{i}/0") for i in range(4000)]
    assert median(lengths) == pytest.approx(MEDIAN, rel=0.1)
    assert max(lengths) == MEDIAN * CAP
    assert sum(n > MEDIAN * math.e for n in lengths) / 4000 == pytest.approx(0.159, abs=0.02)  # one sigma above
    request = Request("a", (1, 2, 3), MEDIAN * CAP, stop_ids=tuple(range(61)), stream="task#5/0")
    engine.submit(request)
    for _ in range(2):
        engine.step()
    (part,) = engine.pause()
    engine.submit(request.continued(part))
    rest = [c for _ in range(MEDIAN * CAP) for c in engine.step()]
    assert len(part.tokens) + len(rest[0].tokens) == engine.length("task#5/0") > 3


def test_an_unknown_part_is_refused():
    with pytest.raises(UserError, match="'slow': no such part; there are tail, nano, short"):
        partial.measure(("slow",))
