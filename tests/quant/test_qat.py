"""The straight-through gradient, the table of what is quantised, and training that knows of its own quantisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.config import build
from nonet.quant import QuantConfig, decode, encode, fake, fake_quant
from nonet.quant.mx import Format, Rule, saturated
from nonet.quant.qat import UNQUANTISED
from nonet.types import UserError

FORMATS: tuple[Format, ...] = ("mxfp4", "mxfp8", "mxfp8_e5m2")
RULES: tuple[Rule, ...] = ("floor", "even", "ceil", "rceil")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_forward_is_fake_and_backward_is_the_identity(fmt, rule, dtype):
    x, upstream = normal(6, 64, dtype=dtype).requires_grad_(), normal(6, 64, seed=1, dtype=dtype)
    y = fake_quant(x, fmt, rule)
    assert y.dtype == dtype
    assert torch.equal(y, fake(x, fmt, rule))
    assert torch.equal(y, decode(encode(x, fmt, rule), dtype))
    assert not torch.equal(y, x)
    (grad,) = torch.autograd.grad(y, x, upstream)
    assert torch.equal(grad, upstream)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gradient_of_saturated_elements_can_be_dropped(fmt):
    x, upstream = normal(64, 64).requires_grad_(), normal(64, 64, seed=1)
    beyond = saturated(x, fmt, "floor")
    assert 0 < beyond.sum() < x.numel() / 8
    (grad,) = torch.autograd.grad(fake_quant(x, fmt, "floor", zero_saturated=True), x, upstream)
    assert torch.equal(grad, upstream * ~beyond)
    (grad,) = torch.autograd.grad(fake_quant(x, fmt, "rceil", zero_saturated=True), x, upstream)
    assert torch.equal(grad, upstream)


def test_the_gradient_reaches_a_view_and_a_transpose():
    w = normal(64, 32).requires_grad_()
    (grad,) = torch.autograd.grad(fake_quant(w.t()).sum(), w)
    assert torch.equal(grad, torch.ones_like(w))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_the_tensors_name(poison):
    x = normal(4, 64)
    x[2, 40] = poison
    with pytest.raises(UserError, match=r"^layers\.7\.experts\.w1 holds NaN or Inf") as refusal:
        QuantConfig().apply(x, "routed_expert_weights", "layers.7.experts.w1")
    assert "\n" not in str(refusal.value)
    assert QuantConfig().apply(x, "other", "norm") is x


# ------------------------------------------------------------------ the table


def test_the_default_is_kimi_k3s_table():
    quant = QuantConfig()
    assert quant.format_of("routed_expert_weights") == "mxfp4"
    assert quant.format_of("routed_expert_inputs") == "mxfp8"
    assert quant.format_of("other") is None
    x = normal(2, 64)
    assert torch.equal(quant.apply(x, "routed_expert_weights", "w"), fake(x, "mxfp4", "floor"))
    assert torch.equal(quant.apply(x, "routed_expert_inputs", "x"), fake(x, "mxfp8", "floor"))
    assert quant.apply(x, "other", "q_proj") is x
    assert UNQUANTISED.apply(x, "routed_expert_weights", "w") is x
    assert UNQUANTISED.apply(x, "routed_expert_inputs", "x") is x


def test_every_field_reaches_the_numbers():
    x = normal(8, 64).requires_grad_()
    quant = QuantConfig(routed_expert_weights="mxfp8_e5m2", rule="even")
    assert torch.equal(quant.apply(x, "routed_expert_weights", "w"), fake(x, "mxfp8_e5m2", "even"))
    y = QuantConfig(zero_saturated=True).apply(x, "routed_expert_weights", "w")
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, (~saturated(x, "mxfp4", "floor")).float())


def test_the_table_is_read_like_any_other():
    assert build(QuantConfig, {"rule": "rceil"}, "quant").rule == "rceil"
    with pytest.raises(UserError, match=r"quant\.routed_expert_weights = 'int4'"):
        build(QuantConfig, {"routed_expert_weights": "int4"}, "quant")
    with pytest.raises(UserError, match=r"did you mean quant\.rule\?"):
        build(QuantConfig, {"rules": "even"}, "quant")


# ------------------------------------------------------------------- training


def loss(w_OI: Tensor, x_NI: Tensor, y_NO: Tensor, quant: QuantConfig) -> Tensor:
    w = quant.apply(w_OI, "routed_expert_weights", "w")
    return F.mse_loss(F.linear(quant.apply(x_NI, "routed_expert_inputs", "x"), w), y_NO)


def test_training_with_quantisation_beats_quantising_afterwards():
    """Linear regression on correlated inputs: rounding errors of a row can make up for each other, once trained to."""
    x = normal(512, 8, seed=4).repeat(1, 8) + 0.1 * normal(512, 64, seed=5)
    best = normal(16, 64, seed=6)
    y = F.linear(x, best)
    w = best.clone().requires_grad_()
    optimizer = torch.optim.Adam([w], lr=0.003)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 200)
    for _ in range(200):
        optimizer.zero_grad()
        loss(w, x, y, QuantConfig()).backward()
        optimizer.step()
        schedule.step()
    trained, afterwards = (loss(v.detach(), x, y, QuantConfig()).item() for v in (w, best))
    assert trained < 0.5 * afterwards
