"""Sequences that begin alike: read as a tree, every position computes what it would alone, and so do the gradients."""

import pytest
import tiny
import torch

from nonet.model import Model
from nonet.model.tree import Tree

SHARED, OWN = [5, 1, 20], [[3, 7, 1], [2], [4, 33]]


def laid_out(seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The row, and each sequence by itself."""
    draw = iter(tiny.tokens(200, seed=seed).split(1))
    take = lambda n: torch.cat([next(draw) for _ in range(n)])  # noqa: E731
    shared = [take(n) for n in SHARED]
    own = [[take(n) for n in group] for group in OWN]
    row = torch.cat([*shared, *(x for group in own for x in group)]).unsqueeze(0)
    return row, [torch.cat([s, x]) for s, group in zip(shared, own, strict=True) for x in group]


def own_parts(hidden_1ND: torch.Tensor) -> list[torch.Tensor]:
    flat = [n for group in OWN for n in group]
    return list(hidden_1ND[0, sum(SHARED) :].split(flat))


def gradient(m: Model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_each_own_part_is_what_it_would_be_alone(kind):
    m = tiny.model(kind, dtype=torch.float64)
    row, alone = laid_out()
    with torch.no_grad():
        found = m(row, tree=Tree(SHARED, OWN))
        for part, ids in zip(own_parts(found), alone, strict=True):
            torch.testing.assert_close(part, m(ids.unsqueeze(0))[0, -len(part) :], atol=1e-9, rtol=1e-9)
        ends = [a + n - 1 for a, n in zip(Tree(SHARED, OWN).shared_starts, SHARED, strict=True)]
        firsts = [alone[0][: SHARED[0]], alone[3][: SHARED[1]], alone[4][: SHARED[2]]]
        for end, ids in zip(ends, firsts, strict=True):
            torch.testing.assert_close(found[0, end], m(ids.unsqueeze(0))[0, -1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_gradients_are_the_sum_of_those_alone(kind):
    """Through attention to a shared part, KDA's state and the convolutions' last inputs alike."""
    m = tiny.model(kind, dtype=torch.float64)
    row, alone = laid_out(1)
    weights = [torch.randn(n, m.config.d_model, dtype=torch.float64) for group in OWN for n in group]
    sum((p * w).sum() for p, w in zip(own_parts(m(row, tree=Tree(SHARED, OWN))), weights, strict=True)).backward()
    tree = gradient(m)
    m.zero_grad()
    for ids, w in zip(alone, weights, strict=True):
        (m(ids.unsqueeze(0))[0, -len(w) :] * w).sum().backward()
    expected = gradient(m)
    assert tree.keys() == expected.keys()
    for name, g in expected.items():
        torch.testing.assert_close(tree[name], g, atol=1e-8, rtol=1e-7, msg=name)


def test_positions_go_on_from_what_is_shared():
    assert Tree([2, 1], [[2, 1], [3]]).positions_N.tolist() == [0, 1, 0, 2, 3, 2, 1, 2, 3]


@pytest.mark.parametrize(("shared", "own"), [([2], [[1], [1]]), ([0], [[1]]), ([2], [[]]), ([2], [[0, 3]])])
def test_parts_of_nothing_are_refused(shared, own):
    with pytest.raises(ValueError, match="needs groups of parts of 1 or more"):
        Tree(shared, own)
