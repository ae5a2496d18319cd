"""Law 1: chunked KDA == recurrent KDA, forward and backward, in torch and in C; padding passes through."""

from __future__ import annotations

import math
from collections.abc import Callable

import kda_cases
import pytest
import torch
from kda_cases import GATES, KEYS
from torch import Tensor

from nonet import native
from nonet.ops.kda import kda, kda_chunk, kda_recurrent, kda_step_

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 70)
LOWER = -5.0


def floorless(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk form that assumes no lower bound."""
    return kda_chunk(q, k, v, g, beta, state, None)


def in_c(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    if reason := native.reason():
        pytest.skip(f"no native library: {reason}")
    return kda(q, k, v, g, beta, state, LOWER)


FORMS = {"chunk": kda_chunk, "chunk without a floor": floorless, "C": in_c}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
Form = Callable[..., tuple[Tensor, ...]]


def inputs(T: int, gates: str = "k3", keys: str = "random", K: int = 16, V: int = 32) -> list[Tensor]:
    return [x.double() for x in kda_cases.case(T, gates, keys, H=3, K=K, V=V)]


@every_form
@pytest.mark.parametrize("T", LENGTHS)
def test_forward(form: Form, T: int):
    args = inputs(T)
    assert kda_cases.error(form(*args), kda_recurrent(*args)) < 1e-12


@every_form
@pytest.mark.parametrize("T", LENGTHS)
def test_backward_for_every_input(form: Form, T: int):
    args = inputs(T)
    assert kda_cases.error(kda_cases.gradients(form, args), kda_cases.gradients(kda_recurrent, args)) < 1e-10


@every_form
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("keys", KEYS)
def test_every_regime_of_gates_and_keys(form: Form, gates: str, keys: str):
    args = inputs(67, gates, keys)
    assert kda_cases.error(form(*args), kda_recurrent(*args)) < 1e-11
    assert kda_cases.error(kda_cases.gradients(form, args), kda_cases.gradients(kda_recurrent, args)) < 1e-10


def test_widths_that_are_no_multiple_of_anything():
    args = inputs(37, K=6, V=5)
    assert kda_cases.error(kda_chunk(*args), kda_recurrent(*args)) < 1e-12
    assert kda_cases.error(kda(*args, LOWER), kda_recurrent(*args)) < 1e-12


def test_a_decay_without_a_floor():
    """Kimi-Linear's gates reach far below -5: e^-30 a step, where factors of a chunk would overflow."""
    args = inputs(67)
    args[3] = torch.where(args[3] < -1, 30 * args[3], 0.1 * args[3])
    assert args[3].min() < -100
    for form in (floorless, lambda *a: kda(*a, None)):
        assert kda_cases.error(form(*args), kda_recurrent(*args)) < 1e-11
        assert kda_cases.error(kda_cases.gradients(form, args), kda_cases.gradients(kda_recurrent, args)) < 1e-10


@every_form
def test_beta_zero_and_g_zero_leave_the_state_untouched(form: Form):
    for T in (1, 16, 19, 40):
        q, k, v, _, _, S = inputs(T)
        g, beta = torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=q.dtype)
        assert torch.equal(kda_recurrent(q, k, v, g, beta, S)[1], S)
        assert torch.equal(form(q, k, v, g, beta, S)[1], S)


@every_form
def test_padding_behind_the_tokens_changes_neither_them_nor_the_state(form: Form):
    q, k, v, g, beta, S = inputs(29)
    g[:, 21:], beta[:, 21:] = 0, 0
    o, end = form(q, k, v, g, beta, S)
    short = kda_recurrent(q[:, :21], k[:, :21], v[:, :21], g[:, :21], beta[:, :21], S)
    assert kda_cases.error((o[:, :21], end), short) < 1e-12


@every_form
@pytest.mark.parametrize("cut", [1, 7, 16, 30])
def test_the_state_carries_everything_across_a_cut(form: Form, cut: int):
    *sequences, S = inputs(37)
    first, middle = form(*[x[:, :cut] for x in sequences], S)
    second, last = form(*[x[:, cut:] for x in sequences], middle)
    assert kda_cases.error((torch.cat([first, second], 1), last), kda_recurrent(*sequences, S)) < 1e-12


@pytest.mark.parametrize("switch", [False, True])
def test_a_step_is_one_position_of_the_recurrence(switch: bool):
    *sequences, S = inputs(4)
    slow, end = kda_recurrent(*sequences, S)
    mine = S.clone()
    for t in range(4):
        assert kda_cases.error([kda_step_(*[x[:, t] for x in sequences], mine, native=switch)], [slow[:, t]]) < 1e-12
    assert kda_cases.error([mine], [end]) < 1e-12


def test_the_recurrence_decays_then_writes_then_reads():
    """By hand with one key and one value channel: S = 2 -> 1 (decay) -> 1 + 1/2 * 3 * (10 - 3 * 1) = 11.5 -> o
    = 2 * 11.5.
    """
    one = [torch.tensor([[[[x]]]], dtype=torch.float64) for x in (2.0, 3.0, 10.0, math.log(0.5))]
    beta = torch.tensor([[[0.5]]], dtype=torch.float64)
    o, S = kda_recurrent(*one, beta, torch.tensor([[[[2.0]]]], dtype=torch.float64))
    assert S.item() == pytest.approx(11.5)
    assert o.item() == pytest.approx(23.0)
