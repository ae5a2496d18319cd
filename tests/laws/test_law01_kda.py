"""Law 1: chunked KDA == recurrent KDA, forward and backward; padding passes through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nonet.ops.kda import CHUNK, kda_chunk, kda_recurrent, kda_step_

LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5, 70]


def inputs(
    T: int, seed: int = 0, dtype: torch.dtype = torch.float64, H: int = 3, K: int = 6, V: int = 5
) -> list[Tensor]:
    """q, k, v, g, beta and an incoming state as the mixer makes them: q and k normalised, g in [-5, 0], beta in
    (0, 1).
    """
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=gen, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(T, H, K), dim=-1) for _ in range(2))
    g = -5 * torch.sigmoid(2 * normal(T, H, K))
    made = [q * K**-0.5, k, normal(T, H, V), g, torch.sigmoid(normal(T, H)), normal(H, K, V)]
    return [x.to(dtype) for x in made]


def gradients(fn, args: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of both outputs."""
    leaves = [x.clone().requires_grad_() for x in args]
    o, S = fn(*leaves)
    gen = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=gen, dtype=x.dtype) for x in (o, S)]
    return list(torch.autograd.grad((o * weights[0]).sum() + (S * weights[1]).sum(), leaves))


@pytest.mark.parametrize("T", LENGTHS)
def test_chunk_is_recurrent_forward(T):
    args = inputs(T)
    for fast, slow in zip(kda_chunk(*args), kda_recurrent(*args), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("T", LENGTHS)
def test_chunk_is_recurrent_backward_for_every_input(T):
    args = inputs(T)
    for fast, slow in zip(gradients(kda_chunk, args), gradients(kda_recurrent, args), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("decay", [-5.0, 0.0])
def test_the_strongest_and_the_weakest_decay_everywhere(decay):
    args = inputs(67)
    args[3] = torch.full_like(args[3], decay)
    for fast, slow in zip(kda_chunk(*args), kda_recurrent(*args), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    for fast, slow in zip(gradients(kda_chunk, args), gradients(kda_recurrent, args), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-10)


def test_float32_survives_the_strongest_decay():
    """16 * 5 = 80 nats in a chunk: naive exp(-G) would be e^80, and its products would lose everything."""
    args = inputs(64, dtype=torch.float32)
    args[3] = torch.full_like(args[3], -5.0)
    wide = [x.double() for x in args]
    for fast, slow in zip(kda_chunk(*args), kda_recurrent(*wide), strict=True):
        torch.testing.assert_close(fast.double(), slow, rtol=1e-4, atol=1e-5)


def test_beta_zero_and_g_zero_leave_the_state_untouched():
    for T in (1, CHUNK, CHUNK + 3):
        q, k, v, _, _, S = inputs(T)
        g, beta = torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=q.dtype)
        assert torch.equal(kda_recurrent(q, k, v, g, beta, S)[1], S)
        assert torch.equal(kda_chunk(q, k, v, g, beta, S)[1], S)


def test_padding_behind_the_tokens_changes_neither_them_nor_the_state():
    q, k, v, g, beta, S = inputs(29)
    g[:, 21:], beta[:, 21:] = 0, 0
    o, end = kda_chunk(q, k, v, g, beta, S)
    o_short, end_short = kda_recurrent(q[:, :21], k[:, :21], v[:, :21], g[:, :21], beta[:, :21], S)
    torch.testing.assert_close(o[:, :21], o_short, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(end, end_short, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 7, CHUNK, 30])
def test_the_state_carries_everything_across_a_cut(cut):
    *sequences, S = inputs(37)
    o, end = kda_chunk(*sequences, S)
    first, middle = kda_chunk(*[x[:, :cut] for x in sequences], S)
    second, last = kda_chunk(*[x[:, cut:] for x in sequences], middle)
    torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=1e-10, atol=1e-12)


def test_a_step_is_one_position_of_the_recurrence():
    *sequences, S = inputs(4)
    slow, end = kda_recurrent(*sequences, S)
    mine = S.clone()
    for t in range(4):
        torch.testing.assert_close(kda_step_(*[x[:, t] for x in sequences], mine), slow[:, t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine, end, rtol=1e-12, atol=1e-12)


def test_the_recurrence_decays_then_writes_then_reads():
    """By hand with one key and one value channel: S = 2 -> 1 (decay) -> 1 + 1/2 * 3 * (10 - 3 * 1) = 11.5 -> o
    = 2 * 11.5.
    """
    one = [torch.tensor([[[[x]]]], dtype=torch.float64) for x in (2.0, 3.0, 10.0, math.log(0.5))]
    beta = torch.tensor([[[0.5]]], dtype=torch.float64)
    o, S = kda_recurrent(*one, beta, torch.tensor([[[[2.0]]]], dtype=torch.float64))
    assert S.item() == pytest.approx(11.5)
    assert o.item() == pytest.approx(23.0)
