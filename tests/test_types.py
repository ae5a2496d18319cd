"""The nouns: what a trajectory remembers, and what they refuse to hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.harness import load_spec
from nonet.types import HarnessSpec, Message, Segment, ToolCall, Trajectory


def policy(*tokens: int, version: int = 0) -> Segment:
    n = len(tokens)
    return Segment("policy", tokens, tuple(-0.1 * t for t in tokens), (-1.0,) * n, version)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(author="policy", tokens=(1, 2), logprobs=(-0.1,), raw_logprobs=(-0.1, -0.1)),
        dict(author="policy", tokens=(1, 2), logprobs=(-0.1, -0.1)),
        dict(author="tool", tokens=(1,), logprobs=(-0.1,), raw_logprobs=(-0.1,)),
        dict(author="prompt", tokens=(1,), raw_logprobs=(0.0,)),
    ],
)
def test_a_segment_without_one_logprob_per_policy_token_cannot_exist(wrong):
    """rllm#816: log-probs kept for text that re-tokenised to another length, the tail padded with 0.0."""
    with pytest.raises(ValueError, match=r"carries \d behaviour and \d raw log-probs; needs \d of each"):
        Segment(**wrong)


def test_a_pause_leaves_no_trace_and_a_version_boundary_does():
    t = Trajectory("t", 0, 0)
    for s in (Segment("prompt", (1,)), policy(2, 3, version=2), policy(4, version=2), policy(5, version=4)):
        t.append(s)
    assert [(s.author, s.tokens, s.policy_version) for s in t.segments] == [
        ("prompt", (1,), -1), ("policy", (2, 3, 4), 2), ("policy", (5,), 4),
    ]  # fmt: skip
    assert t.segments[1].logprobs == pytest.approx((-0.2, -0.3, -0.4))
    assert t.last_turn() == (2, 3, 4, 5)


def test_a_sample_that_spans_versions_2_4_6_keeps_them_per_token():
    """slime PR#2092: tokens [2, 2, 8] written by versions [2, 4, 6]."""
    t = Trajectory("t", 0, 0, [Segment("prompt", (9,))])
    for n, version in ((2, 2), (2, 4), (8, 6)):
        t.append(policy(*range(n), version=version))
    assert t.versions == (2, 4, 6)
    assert [len(s.tokens) for s in t.segments[1:]] == [2, 2, 8]
    assert t.policy_tokens == 12


def test_a_turn_ends_at_the_tools_words():
    t = Trajectory(
        "t",
        0,
        0,
        [Segment("prompt", (1,)), policy(2), Segment("tool", (3, 3), texts=("ok",)), policy(4), policy(5, version=1)],
    )
    assert t.last_turn() == (4, 5)
    assert t.policy_tokens == 3
    t.append(Segment("tool", (6,)))
    assert t.last_turn() == ()


segments = st.one_of(
    st.builds(lambda n: Segment("prompt", tuple(range(n))), st.integers(0, 3)),
    st.builds(lambda n, texts: Segment("tool", tuple(range(n)), texts=tuple(texts)), st.integers(0, 3),
    st.lists(st.text(max_size=5), max_size=2)),
    st.builds(
        lambda lps, v: Segment("policy", tuple(range(len(lps))), tuple(lps), tuple(lps), v),
        st.lists(st.floats(-50, 0), max_size=4), st.integers(0, 3),
    ),
)  # fmt: skip


@given(st.lists(segments, max_size=6), st.dictionaries(st.text(max_size=3), st.floats(-5, 5), max_size=2))
def test_json_carries_a_trajectory_exactly(parts, rewards):
    sandbox = {"tools": ["a"], "files": {"x": "y"}}
    t = Trajectory(
        "general.add/train/3", 4, 5, status="parked", stop_reason="s", sandbox=sandbox, rewards=rewards, harness="h"
    )
    for s in parts:
        t.append(s)
    assert Trajectory.from_json(json.loads(json.dumps(t.to_json()))) == t
    assert t.tokens == tuple(x for s in parts for x in s.tokens)


def test_equal_specs_have_equal_hashes_and_every_field_counts():
    base = HarnessSpec("a")
    assert base.hash == HarnessSpec("a").hash
    changed = [
        HarnessSpec("b"), HarnessSpec("a", system="x"), HarnessSpec("a", effort="x"),
        HarnessSpec("a", call_open="<c>"), HarnessSpec("a", call_close="</c>"),
        HarnessSpec("a", think_open="<t>"), HarnessSpec("a", think_close="</t>"), HarnessSpec("a", tool_role="user"),
        HarnessSpec("a", max_turns=3), load_spec("terse"), load_spec("plain"),
    ]  # fmt: skip
    assert len({s.hash for s in [base, *changed]}) == len(changed) + 1


def test_a_message_reads_back_its_parts():
    m = Message.assistant("said", "thought", [ToolCall("f", {"x": 1})])
    assert (m.text, m.reasoning, [c.name for c in m.calls]) == ("said", "thought", ["f"])
    assert Message.assistant().parts == ()
