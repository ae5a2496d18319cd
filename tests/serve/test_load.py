"""The bench's mixed load, smaller: every request gets what it must get, nothing is held afterwards, memory is flat."""

from __future__ import annotations

import pytest

from nonet.bench.serve import Load, measure


@pytest.mark.timeout(600)
def test_mixed_load_leaves_nothing_behind():
    work = Load(requests=200, clients=16, warm_up=100, hang_up=0.2, malformed=0.1, overlong=0.1)
    figures = measure(work)
    assert set(figures["requests"]) == {"ordinary", "hang_up", "malformed", "overlong"}
    assert figures["unanswered"] == 0
    assert figures["held"]["nonet_open_requests"] == figures["left"] == 0
    assert figures["rss_growth_mb"] < 30
