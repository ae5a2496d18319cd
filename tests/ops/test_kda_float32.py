"""KDA in float32 against the recurrence in float64: errors, causality to the last bit, gradients, levels, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kda_cases import GATES, KEYS, LENGTHS, case, error, gradients, right
from torch import Tensor

from nonet import native
from nonet.ops.kda import kda, kda_chunk, kda_recurrent, kda_step_

needs_native = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")
LOWER = -5.0


def in_c(*args: Tensor) -> tuple[Tensor, ...]:
    return kda(*args, LOWER)


def floorless(*args: Tensor) -> tuple[Tensor, Tensor]:
    return kda_chunk(*args, lower_bound=None)  # type: ignore[misc]


FORMS = [
    pytest.param(in_c, id="C", marks=needs_native),
    pytest.param(kda_chunk, id="torch"),
    pytest.param(floorless, id="torch without a floor"),
]
every_form = pytest.mark.parametrize("form", FORMS)
FORWARD = 2e-6  # relative to the largest number
GRADIENT = 4e-5 if native.level() == "portable" else 2e-5  # without fused multiply-add repeated keys cost 3.1e-5
Form = Callable[..., tuple[Tensor, ...]]


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@every_form
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gates", GATES)
def test_forward(form: Form, gates: str, keys: str, T: int):
    args = case(T, gates, keys)
    assert error(form(*args), right(args)) <= FORWARD
    args[-1] = torch.zeros_like(args[-1])
    assert error(form(*args), right(args)) <= FORWARD


@every_form
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gates", GATES)
def test_forward_at_full_width_and_with_small_queries(form: Form, gates: str, keys: str):
    """Small entries are what flushed denormals would lose."""
    args = case(128, gates, keys, B=1, K=128, V=128)
    args[0] *= 1e-6
    assert error(form(*args), right(args)) <= FORWARD


def test_gates_far_below_the_floor_of_k3():
    """Kimi-Linear's: strong ones of e^-30 and more among weak ones, which must stay sharp behind them."""
    args = case(200)
    args[3] = torch.where(args[3] < -1, 30 * args[3], 0.02 * args[3])
    assert error(kda(*args, lower_bound=None), right(args)) <= FORWARD
    wanted = gradients(kda_recurrent, [x.double() for x in args])
    assert error(gradients(floorless, args), wanted) <= 2e-5


@every_form
@pytest.mark.parametrize("gates", GATES)
def test_flushing_denormals_costs_nothing(form: Form, gates: str, flushing: None):
    args = case(100, gates)
    assert error(form(*args), right(args)) <= FORWARD


@needs_native
def test_c_flushes_for_itself_and_leaves_the_callers_mode_alone():
    tiny = torch.tensor([1e-39])
    args = case(50, "strongest")
    before = in_c(*args)[0]
    assert (tiny * 1.0).item() > 0
    assert torch.set_flush_denormal(True)
    try:
        after = in_c(*args)[0]
        assert (tiny * 1.0).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(before, after)


@every_form
@pytest.mark.parametrize("t", [1, 7, 16, 23, 40, 64])
@pytest.mark.parametrize("gates", GATES)
def test_what_comes_later_changes_no_bit_of_what_came_before(form: Form, gates: str, t: int):
    *sequences, S = case(70, gates)
    *others, _ = case(70, "k3", seed=1)
    changed = [torch.cat([a[:, :t], b[:, t:]], 1) for a, b in zip(sequences, others, strict=True)]
    assert torch.equal(form(*sequences, S)[0][:, :t], form(*changed, S)[0][:, :t])


@needs_native
@pytest.mark.parametrize("T", [1, 15, 16, 17, 50])
def test_a_prefix_alone_gives_the_same_bits(T: int):
    *sequences, S = case(70)
    assert torch.equal(in_c(*(x[:, :T] for x in sequences), S)[0], in_c(*sequences, S)[0][:, :T])


@every_form
@pytest.mark.parametrize("cut", [1, 16, 17, 48, 999])
def test_splits(form: Form, cut: int):
    """Anywhere within rounding; at a multiple of 16 in C, to the last bit."""
    *sequences, S = case(1000, "mixed")
    first, middle = form(*(x[:, :cut] for x in sequences), S)
    second, end = form(*(x[:, cut:] for x in sequences), middle)
    assert error((torch.cat([first, second], 1), end), right([*sequences, S])) <= FORWARD
    if form is in_c and cut % 16 == 0:
        whole, last = form(*sequences, S)
        assert torch.equal(torch.cat([first, second], 1), whole)
        assert torch.equal(end, last)


@every_form
@pytest.mark.parametrize("T", [1, 15, 17, 64, 65, 130])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gates", GATES)
def test_gradients(form: Form, gates: str, keys: str, T: int):
    args = case(T, gates, keys)
    found, wanted = gradients(form, args), gradients(kda_recurrent, [x.double() for x in args])
    for name, a, b in zip(("q", "k", "v", "g", "beta", "state"), found, wanted, strict=True):
        assert error([a], [b]) <= GRADIENT, name


@needs_native
@pytest.mark.parametrize("gates", GATES)
def test_gradients_of_c_in_float64(gates: str):
    args = [x.double() for x in case(83, gates, K=48, V=16)]
    assert error(gradients(in_c, args), gradients(kda_recurrent, args)) <= 1e-10


@needs_native
def test_gradcheck():
    """Against finite differences, over a chunk and a bit, through every input."""
    args = [x.double().requires_grad_() for x in case(18, B=1, H=1, K=16, V=16)]
    assert torch.autograd.gradcheck(in_c, args, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)


@needs_native
def test_only_what_is_asked_for_gets_a_gradient_and_either_output_alone_will_do():
    args = case(20)
    wanted = gradients(kda_recurrent, [x.double() for x in args])
    assert all(x.abs().max() > 0 for x in wanted)
    for pick in (0, 1):
        leaves = [x.clone().requires_grad_() for x in args]
        double = [x.double().requires_grad_() for x in args]
        mine = torch.autograd.grad(in_c(*leaves)[pick].square().sum(), leaves[1:5], allow_unused=True)
        slow = torch.autograd.grad(kda_recurrent(*double)[pick].square().sum(), double[1:5])
        assert error([x for x in mine if x is not None], slow) <= 2e-5
    beta = args[4].clone().requires_grad_()
    in_c(*args[:4], beta, args[5])[0].sum().backward()
    assert beta.grad is not None


@needs_native
@pytest.mark.parametrize("level", native.LEVELS)
def test_every_level_of_processor(level: str, monkeypatch):
    if level not in native.supported():
        pytest.skip(f"this processor does not have {level}")
    library = native.load(level)
    monkeypatch.setattr(native, "library", lambda: library)
    for widths in ({"K": 16, "V": 16}, {"K": 48, "V": 80}, {"K": 256, "V": 128}):
        args = case(70, "mixed", **widths)
        assert error(in_c(*args), right(args)) <= 2e-6
        wanted = gradients(kda_recurrent, [x.double() for x in args])
        assert error(gradients(in_c, args), wanted) <= 2e-5
        state = args[5].clone()
        o = kda_step_(*(x[:, 0] for x in args[:5]), state)
        slow = right([*(x[:, :1] for x in args[:5]), args[5]])
        assert error((o, state), (slow[0][:, 0], slow[1])) <= 1e-6


@needs_native
def test_threads_change_no_bit():
    args = case(200, B=3, H=3)
    once = [*in_c(*args), *gradients(in_c, args)]
    torch.set_num_threads(2)
    try:
        twice = [*in_c(*args), *gradients(in_c, args)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@needs_native
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("batch", [1, 5])
def test_steps(gates: str, batch: int):
    """Error of sixty steps, and that the switch leads to the same numbers."""
    *sequences, S = case(60, gates, B=batch, K=128, V=128)
    slow, end = right([*sequences, S])
    for switch in (True, False):
        state, outputs = S.clone(), []
        for t in range(60):
            outputs.append(kda_step_(*(x[:, t] for x in sequences), state, native=switch))
        assert error((torch.stack(outputs, 1), state), (slow, end)) <= 2e-6


def test_collinear_keys_are_a_real_trap():
    """(I + L)^-1 as a product of powers of L, which is exact on paper, loses everything there in float32."""
    args = case(16, "none", "collinear", B=1, H=1)
    k, beta = args[1][0, :, 0], args[4][0, :, 0]
    L, eye = (beta[:, None] * (k @ k.T)).tril(-1), torch.eye(16)
    powers = [L, L @ L, torch.linalg.matrix_power(L, 4), torch.linalg.matrix_power(L, 8)]
    product = (eye - powers[0]) @ (eye + powers[1]) @ (eye + powers[2]) @ (eye + powers[3])
    exact = torch.linalg.inv(eye.double() + L.double())
    assert error([product], [exact]) > 2e-5
