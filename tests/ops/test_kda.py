"""`kda`, the one door: packed and padded sequences, exported states, dtypes, layouts, switches, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kda_cases import case, error, gradients, right
from torch import Tensor

from nonet import native
from nonet.ops import kda as door
from nonet.ops import kda_native
from nonet.ops.kda import kda, kda_recurrent
from nonet.ops.sequences import Sequences

LOWER = -5.0
both = pytest.mark.parametrize(
    "switch",
    [
        pytest.param(True, id="C", marks=pytest.mark.skipif(bool(native.reason()), reason=f"no C: {native.reason()}")),
        pytest.param(False, id="torch"),
    ],
)


def documents(B: int, T: int, starts: list[int], counts: list[int] | None = None) -> list[tuple[int, int, int]]:
    """(row, first, behind the last) of each, worked out by hand's rules."""
    ends = [*starts[1:], B * T]
    lengths = counts or [b - a for a, b in zip(starts, ends, strict=True)]
    return [(s // T, s % T, s % T + n) for s, n in zip(starts, lengths, strict=True)]


# ----------------------------------------------------------------------------------------------- packed and padded


PACKED = [
    (1, 70, [0, 1, 17, 33, 64], None),
    (2, 40, [0, 16, 40, 43, 79], None),
    (2, 40, [0, 16, 40, 43, 70], [16, 5, 3, 0, 10]),
    (3, 33, [0, 33, 66], [33, 1, 20]),
]
NOBODY = [(1, 20, [0, 5], [0, 0]), (1, 20, [0], [0])]


@both
@pytest.mark.parametrize(("B", "T", "starts", "counts"), PACKED + NOBODY)
def test_packed_sequences_are_as_alone(switch: bool, B: int, T: int, starts: list[int], counts: list[int] | None):
    *sequences, _ = case(T, B=B)
    S = case(T, B=len(starts), seed=5)[-1]
    o, end = kda(*sequences, S, LOWER, starts=starts, counts=counts, native=switch)
    nobody = torch.ones(B, T, dtype=torch.bool)
    for n, (row, a, b) in enumerate(documents(B, T, starts, counts)):
        nobody[row, a:b] = False
        if a == b:
            assert torch.equal(end[n], S[n])
            continue
        alone = right([*(x[row : row + 1, a:b] for x in sequences), S[n : n + 1]])
        assert error((o[row : row + 1, a:b], end[n : n + 1]), alone) <= 5e-6
    assert not o[nobody].any()


@both
@pytest.mark.parametrize(("B", "T", "starts", "counts"), PACKED)
def test_gradients_stay_within_a_sequence(switch: bool, B: int, T: int, starts: list[int], counts: list[int] | None):
    *sequences, _ = [x.double() for x in case(T, B=B, K=16, V=16)]
    S = case(T, B=len(starts), seed=5, K=16, V=16)[-1].double()

    def packed(*args: Tensor) -> tuple[Tensor, ...]:
        return kda(*args, LOWER, starts=starts, counts=counts, native=switch)

    def alone(*args: Tensor) -> tuple[Tensor, Tensor]:
        *rows, state = args
        o, ends = torch.zeros(B, T, 2, 16, dtype=torch.float64), []
        for n, (row, a, b) in enumerate(documents(B, T, starts, counts)):
            end = state[n : n + 1]
            if a < b:
                piece, end = kda_recurrent(*(x[row : row + 1, a:b] for x in rows), end)
                o = o.index_put((torch.tensor(row), torch.arange(a, b)), piece[0])
            ends.append(end)
        return o, torch.cat(ends)

    assert error(gradients(packed, [*sequences, S]), gradients(alone, [*sequences, S])) < 1e-10


@both
def test_without_a_state_sequences_start_from_zeros(switch: bool):
    *sequences, S = case(40)
    found = kda(*sequences, None, LOWER, native=switch)
    assert error(found, right([*sequences, torch.zeros_like(S)])) <= 5e-6


@both
def test_training_after_inference_on_the_same_shape(switch: bool):
    """What is kept about a shape must not be an inference tensor."""
    args = case(23, B=3)
    with torch.inference_mode():
        kda(*args, LOWER, native=switch)
    assert all(x.isfinite().all() for x in gradients(lambda *a: kda(*a, LOWER, native=switch), args))


@both
def test_the_state_that_was_given_is_not_changed(switch: bool):
    args = case(20)
    before = args[-1].clone()
    kda(*args, LOWER, native=switch)
    assert torch.equal(args[-1], before)


# ------------------------------------------------------------------------------------------------- exported states


@both
def test_exported_states_are_those_of_the_prefixes(switch: bool):
    *sequences, S = case(100, B=2)
    wanted = [(0, 16), (1, 96), (0, 0), (1, 32), (0, 96)]
    o, end, exported = kda(*sequences, S, LOWER, export=wanted, native=switch)
    assert torch.equal(exported[2], S[0])
    for (n, at), state in zip(wanted, exported, strict=True):
        if at:
            prefix = kda(*(x[n : n + 1, :at] for x in sequences), S[n : n + 1], LOWER, native=switch)[1]
            assert torch.equal(state, prefix[0]) if switch else error([state], [prefix[0].double()]) < 5e-6
    rest = kda(*(x[:1, 96:] for x in sequences), exported[4:5], LOWER, native=switch)
    assert error(rest, [o[:1, 96:].double(), end[:1].double()]) < 5e-6
    if switch:
        assert torch.equal(rest[0], o[:1, 96:])
        assert torch.equal(rest[1], end[:1])


@both
def test_exports_of_packed_sequences_count_from_their_own_start(switch: bool):
    *sequences, _ = case(60, B=1)
    exported = kda(*sequences, None, LOWER, starts=[0, 10], export=[(1, 48), (0, 0)], native=switch)[2]
    alone = kda(*(x[:, 10:58] for x in sequences), None, LOWER, native=switch)[1]
    assert error(exported[:1], alone.double()) <= 5e-6
    assert not exported[1].any()


@both
def test_an_export_needs_no_gradient_and_stops_none(switch: bool):
    args = [x.requires_grad_() for x in case(40)]
    o, _, exported = kda(*args, LOWER, export=[(0, 32)], native=switch)
    assert not exported.requires_grad
    assert all(x is not None for x in torch.autograd.grad(o.sum(), args))


# ---------------------------------------------------------------------------------------------- dtypes and layouts


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(switch: bool, dtype: torch.dtype):
    *sequences, S = case(50)
    half = [x.to(dtype) for x in sequences]
    o, end = kda(*half, S, LOWER, native=switch)
    assert (o.dtype, end.dtype) == (dtype, torch.float32)
    slow = right([*half, S])
    assert error([o], [slow[0].to(dtype).double()]) < 1e-2
    assert error([end], [slow[1]]) <= 5e-6
    assert kda(*half, None, LOWER, native=switch)[1].dtype == dtype


@both
def test_views_with_strides(switch: bool):
    """q, k and v as one projection leaves them; g with a last dimension that is not contiguous."""
    q, k, _, g, beta, _ = case(40, K=32, V=32)
    v, S = case(40, K=32, V=32, seed=3)[2], case(40, K=32, V=32)[-1]
    joined = torch.stack([q, k, v], 2)
    views = [*joined.unbind(2), g.transpose(-1, -2).contiguous().transpose(-1, -2)]
    assert not any(x.is_contiguous() for x in views)
    found = kda(*views, beta.transpose(1, 2).contiguous().transpose(1, 2), S, LOWER, native=switch)
    assert error(found, right([q, k, v, g, beta, S])) <= 5e-6
    joined = joined.double().requires_grad_()
    rest = [x.double() for x in (g, beta, S)]
    mine = torch.autograd.grad(kda(*joined.unbind(2), *rest, LOWER, native=switch)[0].square().sum(), joined)
    slow = torch.autograd.grad(kda_recurrent(*joined.unbind(2), *rest)[0].square().sum(), joined)
    assert error(mine, slow) < 1e-10


# --------------------------------------------------------------------------------------------------------- the road


def roads(monkeypatch) -> list[str]:
    taken: list[str] = []

    def spy(module: Any, name: str, label: str) -> None:
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (taken.append(label), inner(*a, **k))[1])

    spy(kda_native, "scan", "C")
    spy(door, "kda_chunk", "torch")
    return taken


@pytest.mark.parametrize(
    ("widths", "lower", "switch", "road"),
    [
        ({"K": 16, "V": 256}, LOWER, True, "C"),
        ({"K": 16, "V": 256}, LOWER, False, "torch"),
        ({"K": 16, "V": 256}, None, True, "torch"),
        ({"K": 24, "V": 16}, LOWER, True, "torch"),
        ({"K": 16, "V": 272}, LOWER, True, "torch"),
    ],
)
def test_which_road_is_taken(monkeypatch, widths: dict[str, int], lower: float | None, switch: bool, road: str):
    if road == "C" and native.reason():
        pytest.skip(f"no native library: {native.reason()}")
    taken = roads(monkeypatch)
    args = case(20, **widths)
    assert error(kda(*args, lower, native=switch), right(args)) <= 5e-6
    assert taken == [road]


def test_the_environment_switches_c_off(monkeypatch):
    monkeypatch.setenv("NONET_NATIVE", "0")
    native.forget()
    try:
        taken = roads(monkeypatch)
        args = case(20)
        assert error(kda(*args, LOWER), right(args)) <= 5e-6
    finally:
        monkeypatch.delenv("NONET_NATIVE")
        native.forget()
    assert taken == ["torch"]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lower_bound": -5.5}, r"lower_bound -5.5: must lie in \[-5, 0\), or be None for no floor"),
        ({"lower_bound": 0.0}, "lower_bound 0.0"),
        ({"starts": [0, 50, 20]}, r"starts \[0, 50, 20\]: must ascend from 0"),
        ({"starts": [1, 40]}, r"must ascend from 0 and stay below 80"),
        ({"starts": [0, 80]}, "stay below 80"),
        ({"starts": [0, 39]}, "no sequence may cross rows, so multiples of 40"),
        ({"counts": [40]}, "needs one per sequence"),
        ({"counts": [41, 1]}, r"counts \[41, 1\]"),
        ({"export": [(0, 8)]}, "multiple of 16"),
        ({"export": [(2, 16)]}, "sequence below 2"),
        ({"export": [(0, 48)]}, "behind the ends"),
        ({"counts": [15, 40], "export": [(0, 16)]}, "behind the ends"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(change: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        kda(*case(40), **{"lower_bound": LOWER, **change})


@pytest.mark.parametrize("index", [1, 2, 3, 4, 5])
def test_a_tensor_of_the_wrong_shape_is_named(index: int):
    args = case(40)
    args[index] = args[index][:, :1]
    with pytest.raises(ValueError, match=f"^{('q', 'k', 'v', 'g', 'beta', 'state')[index]} is "):
        kda(*args, LOWER)


# ------------------------------------------------------------------------------------------------------- Sequences


def test_padding_and_back():
    x = torch.arange(2 * 6 * 3.0).view(2, 6, 3) + 1
    packed = Sequences.of(2, 6, [0, 2, 6, 9], [2, 3, 3, 1])
    rows = packed.pad(x)
    assert rows.shape == (4, 3, 3)
    assert torch.equal(rows[1], x[0, 2:5])
    assert torch.equal(rows[3, 0], x[1, 3])
    assert not rows[3, 1:].any()
    back = packed.unpad(rows)
    kept = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    assert torch.equal(back, x * kept[..., None])
    assert not packed.covers
    assert Sequences.of(2, 6, [0, 2, 6]).covers
