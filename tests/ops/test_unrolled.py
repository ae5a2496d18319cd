"""Attention of an unrolled draft layer: blocks of rows against the mask over T x steps keys."""

from __future__ import annotations

import pytest
import torch

from nonet.ops import unrolled
from nonet.ops.unrolled import unrolled_attention, unrolled_attention_definition


def inputs(steps: int, T: int, H: int, G: int, seed: int = 0, dtype=torch.float64) -> tuple[torch.Tensor, list, list]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype).requires_grad_()  # noqa: E731
    keys = [draw(2, G, T + steps - 1 - i, 6) for i in range(steps)]  # earlier steps have more rows
    values = [draw(2, G, T + steps - 1 - i, 5) for i in range(steps)]
    return draw(2, H, T, 6), keys, values


@pytest.mark.parametrize("ranges", [None, [(0, 3), (3, 4), (4, 15), (15, 19)]])
@pytest.mark.parametrize(("H", "G"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("steps", [2, 5])
def test_blocks_equal_the_definition_forward_and_backward(monkeypatch, steps: int, H: int, G: int, ranges):
    monkeypatch.setattr(unrolled, "ROWS", 7)  # several blocks, the last one short
    q, keys, values = inputs(steps, 17, H, G)
    leaves = [q, *keys, *values]
    up = torch.randn(2, H, 17, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = []
    for form in (unrolled_attention, unrolled_attention_definition):
        out = form(q, keys, values, 0.4, ranges if ranges is None else [(a, min(b, 17)) for a, b in ranges])
        found.append([out, *torch.autograd.grad((out * up).sum(), leaves)])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-10)


def test_a_document_that_begins_after_the_last_row_is_nothing():
    q, keys, values = inputs(2, 8, 2, 2)
    whole = unrolled_attention(q, keys, values, 1.0, [(0, 8)])
    assert torch.equal(unrolled_attention(q, keys, values, 1.0, [(0, 8), (8, 9)]), whole)


def test_scores_of_thousands_stay_finite():
    q, keys, values = inputs(3, 9, 2, 1, dtype=torch.float32)
    out = unrolled_attention(q * 1e3, keys, values, 10.0)
    out.sum().backward()
    assert out.isfinite().all()
    assert keys[1].grad is not None
    assert keys[1].grad.isfinite().all()
