"""The workloads of `nonet bench prefix`, in small: what they ask for, and that its figures mean what they say."""

from __future__ import annotations

import pytest

from nonet.bench import prefix


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in {"SYSTEM": 64, "ASKED": 20, "ANSWER": 4, "CHATS": 6, "TURNS": 3}.items():
        monkeypatch.setattr(prefix, name, value)


def test_with_room_for_everything_the_cache_saves_nearly_what_is_possible():
    found = prefix.measure(chats=6, turns=3, cold_every=5)
    for name, key in (("hit_48", "plain"), ("hit_48_retries", "retries")):
        assert 0.5 < found[name] <= found["possible"][key] < found[name] + 0.1
    assert found["requests"]["plain"] == 18 < found["requests"]["retries"]
    assert found["ttft_vs_off"] > 0


def test_too_few_snapshots_show(monkeypatch):
    monkeypatch.setattr(prefix, "SNAPSHOTS", 2)
    found = prefix.measure(chats=6, turns=3, cold_every=5)
    assert found["hit_48"] < 0.5 < found["possible"]["plain"]


def test_retries_repeat_a_prompt_or_leave_an_earlier_one():
    seen, again, branched = [], 0, 0
    for chat, prompt, system in prefix.conversations(6, 12, 0.5):
        assert prompt[:system] == chat.text
        again += prompt in seen
        branched += prompt not in seen and any(p[:-20] == prompt[:-20] for p in seen if len(p) > 84)
        seen.append(prompt)
        chat.said.append((*prompt, 1, 2, 3, 4))
    assert again and branched
