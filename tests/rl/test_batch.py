"""Packing: flat arrays that say of every token who wrote it, under which version, at which log-prob."""

from __future__ import annotations

import made
import torch
from hypothesis import given
from hypothesis import strategies as st

from nonet.rl.batch import Scored
from nonet.rl.packing import micro_batches, pack
from nonet.types import Segment

PARTS = [("prompt", 2), ("policy", 2), ("tool", 2), ("policy", 1)]


def numbered(t, start: float):
    """Policy log-probs start, start + 1, ... in order."""
    for i, s in enumerate(t.segments):
        if s.author == "policy":
            values = tuple(start + k for k in range(len(s.tokens)))
            start += len(s.tokens)
            t.segments[i] = Segment("policy", s.tokens, values, values, s.policy_version)
    return t


def test_every_token_knows_its_author_version_logprob_and_advantage():
    """slime#1370: mask [0 0 1 1 0 0 1]; nothing may leak onto the tool's span."""
    a, b = (
        numbered(made.trajectory(0, 0, PARTS), -9),
        numbered(made.trajectory(1, 0, [("prompt", 1), ("policy", 2)]), -3),
    )
    batch = pack([Scored.uniform(a, 0.5), Scored(b, (-2.0, -3.0))])
    assert batch.tokens_T.tolist() == [*a.tokens, *b.tokens]
    assert batch.mask_T.tolist() == [False, False, True, True, False, False, True, False, True, True]
    assert batch.behaviour_T.tolist() == [0, 0, -9, -8, 0, 0, -7, 0, -3, -2]
    assert batch.advantage_T.tolist() == [0, 0, 0.5, 0.5, 0, 0, 0.5, 0, -2, -3]
    assert batch.version_T.tolist() == [-1, -1, 1, 1, -1, -1, 3, -1, 1, 1]
    assert (batch.starts, batch.rows, batch.trained_tokens) == ([0, 7, 10], 2, 5)
    assert "task 0" in batch.names[0]
    assert a.id in batch.names[0]


def test_versions_2_4_6_stay_with_their_tokens():
    """slime PR#2092: tokens [2, 2, 8] of one sample came from versions [2, 4, 6]."""
    t = made.trajectory(parts=[("prompt", 1)])
    for n, version in ((2, 2), (2, 4), (8, 6)):
        t.append(Segment("policy", tuple(range(n)), (-0.1 * version,) * n, (0.0,) * n, version))
    batch = pack([Scored.uniform(t, 1.0)])
    assert batch.version_T.tolist() == [-1, 2, 2, 4, 4, *[6] * 8]
    torch.testing.assert_close(batch.behaviour_T[1:], -0.1 * batch.version_T[1:].float())
    assert bool(batch.mask_T[1:].all())


def test_an_empty_batch_has_no_rows():
    batch = pack([])
    assert (batch.rows, batch.trained_tokens, batch.starts) == (0, 0, [0])


def test_a_part_reads_a_shared_prompt_once_and_stops_at_the_last_trained_token():
    a, b = made.trajectory(0, 0, PARTS), made.trajectory(1, 0, [("prompt", 1), ("policy", 2), ("tool", 4)])
    c = made.trajectory(0, 1, PARTS)
    c.segments[0] = a.segments[0]
    batch = pack([Scored.uniform(t, 1.0) for t in (a, b, c)])
    part = batch.part([1, 2, 0])
    assert part.rows == [1, 2, 0]
    own = [b.tokens[1:2], c.tokens[2:6], a.tokens[2:6]]
    assert part.tokens_1L[0].tolist() == [*b.tokens[:1], *a.tokens[:2], *own[0], *own[1], *own[2]]
    assert part.index_N.tolist() == [8, 9, 16, 17, 20, 2, 3, 6]
    assert part.target_N.tolist() == batch.tokens_T[part.index_N].tolist()
    assert part.row_N.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert part.from_N.tolist() == [0, 3, 2, 4, 7, 2, 8, 11]
    apart = batch.part([1, 2, 0], share=False)
    assert apart.tokens_1L.shape[1] == part.tokens_1L.shape[1] + 2
    assert apart.index_N.tolist() == part.index_N.tolist()


@given(
    lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=12),
    tokens=st.integers(1, 120),
    share=st.booleans(),
    data=st.data(),
)
def test_micro_batches_hold_every_row_once_within_their_limit(lengths, tokens, share, data):
    attempts = []
    for i, (group, n) in enumerate(lengths):
        t = made.trajectory(group, i, [("prompt", 1), ("policy", n)])
        t.segments[0] = Segment("prompt", (group,) * (3 + group))
        attempts.append(Scored.uniform(t, 1.0))
    batch = pack(attempts)
    rows = data.draw(st.permutations(range(len(lengths))))
    micros = micro_batches(batch, rows, tokens, share)
    assert sorted(r for m in micros for r in m) == sorted(rows)
    for m in micros:
        assert len(m) == 1 or batch.part(m, share).tokens_1L.shape[1] <= tokens
