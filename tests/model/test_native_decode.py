"""The decode step in C against its torch twin, on every kind of layer and on sizes that fill no vector."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_layer import MODELS, made, states, twin
from torch import nn

from nonet import native
from nonet.engine import Engine
from nonet.model import Model, SequenceState
from nonet.model.native_decode import NativeDecoder
from nonet.model.native_weights import Watch
from nonet.types import Request, UserError

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 21, 70])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_and_state_are_those_of_torch(name, rows, together):
    model = made(name)
    decoder = NativeDecoder.of(model)
    assert decoder is not None
    decoder.stack.together = together
    ours, theirs = states(model, rows)
    for step in range(8):
        tokens = (torch.arange(rows) * 7 + step).remainder(model.config.vocab_size).unsqueeze(1)
        want = model.logits(model(tokens, theirs)[:, -1]).log_softmax(-1)
        got = decoder.step(tokens, ours).log_softmax(-1)
        # On a grid of inputs, another order of summation may carry a value across a midpoint: one step of E4M3 more.
        torch.testing.assert_close(got, want, atol=2e-2 if model.config.quant else 2e-5, rtol=0)
        assert float((got - want).abs().median()) < 2e-6
    assert torch.equal(ours.lengths_B, theirs.lengths_B)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for key in mine:
            torch.testing.assert_close(mine[key], other[key], atol=2e-2 if model.config.quant else 5e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8", "mxfp4"])
@pytest.mark.parametrize("name", ["llama", "odd", "k3"])
@torch.inference_mode()
def test_a_row_depends_on_neither_batch_mates_nor_threads_to_the_last_bit(name, weights, threads):
    model = made(name)
    decoder = NativeDecoder.of(model, weights)
    assert decoder is not None
    together, apart = states(model, 21)
    tokens = torch.arange(21).unsqueeze(1)
    decoder.stack.together = False
    want = decoder.step(tokens, together)
    for b in (0, 3, 15, 16, 20):
        decoder.stack.together = b % 2 == 1
        assert torch.equal(decoder.step(tokens[b : b + 1], apart.rows(b, b + 1))[0], want[b])
    decoder.stack.together = True
    assert torch.equal(decoder.step(tokens, states(model, 21)[0]), want)


@torch.inference_mode()
def test_long_contexts_are_brought_together_from_their_spans(threads):
    for name in ("llama", "odd"):
        model = made(name)
        decoder = NativeDecoder.of(model)
        assert decoder is not None
        tokens = torch.randint(0, 40, (2, 700), generator=torch.Generator().manual_seed(3))
        ours = SequenceState.new(model.config, 2, 720, torch.float32)
        theirs = SequenceState.new(model.config, 2, 720, torch.float32)
        for state in (ours, theirs):
            model(tokens, state, torch.tensor([700, 511]))
        want = model.logits(model(tokens[:, :1], theirs)[:, -1]).log_softmax(-1)
        torch.testing.assert_close(decoder.step(tokens[:, :1], ours).log_softmax(-1), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("weights", ["bf16", "int8", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_weights_in_fewer_bits_are_a_torch_model_with_rounded_weights(name, weights, rows):
    model = made(name)
    decoder, reference = NativeDecoder.of(model, weights), twin(model, weights)
    assert decoder is not None
    ours, theirs = states(reference, rows)
    for step in range(3):
        tokens = (torch.arange(rows) * 7 + step).remainder(model.config.vocab_size).unsqueeze(1)
        want = reference.logits(reference(tokens, theirs)[:, -1]).log_softmax(-1)
        got = decoder.step(tokens, ours).log_softmax(-1)
        # The processor's products of bfloat16 pairs take activations to 16 bits (native/pairs.h).
        close = 2e-2 if model.config.quant else 5e-5 if weights == "bf16" else 2e-5
        torch.testing.assert_close(got, want, atol=close, rtol=0)
        assert float((got - want).abs().median()) < (1e-5 if weights == "bf16" else 3e-6)


@pytest.mark.parametrize("rows", [1, 6])
@torch.inference_mode()
def test_w16a16_rounds_what_the_weights_multiply(rows):
    """A rounding that falls the other way here than in torch is 2^-9 of one activation: hence medians."""
    if native.level() != "v4" or "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a processor with AVX512-BF16 and NONET_NATIVE unset or v4; elsewhere w16a16 is bf16")
    model = made("llama")
    decoder, exact, rounding = NativeDecoder.of(model, "w16a16"), twin(model, "bf16"), twin(model, "bf16")
    assert decoder is not None
    for module in rounding.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),))
    tokens, (ours, theirs), (third, _) = torch.arange(rows)[:, None], states(exact, rows), states(exact, rows)
    got = decoder.step(tokens, ours)
    near = (got - rounding.logits(rounding(tokens, theirs)[:, -1])).abs().median()
    far = (got - exact.logits(exact(tokens, third)[:, -1])).abs().median()
    assert near < far / 4 and far < 1e-2


@pytest.mark.parametrize("name", ["llama", "odd", "k3"])
@torch.inference_mode()
def test_float32_sums_are_the_same_in_tiles_of_every_height(name):
    model = made(name)
    decoder = NativeDecoder.of(model)
    assert decoder is not None
    tokens = torch.arange(27).unsqueeze(1)
    decoder.stack.together = True
    want = decoder.step(tokens, states(model, 27)[0])
    for rows in range(1, 27):
        assert torch.equal(decoder.step(tokens[:rows], states(model, 27)[0].rows(0, rows)), want[:rows])


def scaled(model: Model) -> None:
    for p in model.parameters():
        p.mul_(1.1)


def replaced(model: Model) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9


def loaded(model: Model) -> None:
    model.load_state_dict({name: w * 0.9 for name, w in model.state_dict().items()})


def trained(model: Model) -> None:
    """torch does not count what its fused optimisers change."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, fused=True).step()


@pytest.mark.parametrize("change", [scaled, replaced, loaded, trained])
@pytest.mark.parametrize("weights", ["float32", "bf16", "w16a16", "int8", "mxfp4"])
@pytest.mark.parametrize("name", ["k3", "k3, quantised"])
@torch.no_grad()
def test_copies_follow_the_weights_at_once(name, weights, change):
    model = made(name)
    decoder = NativeDecoder.of(model, weights)
    assert decoder is not None
    tokens, before = torch.tensor([[3], [5]]), states(model, 2)
    old = decoder.step(tokens, before[0])
    change(model)
    now, again = states(model, 2)
    fresh = NativeDecoder.of(model, weights)
    assert fresh is not None
    got = decoder.step(tokens, now)
    assert torch.equal(got, fresh.step(tokens, again))
    assert not torch.allclose(got, old, atol=1e-3)


def test_a_weight_replaced_twice_is_seen_wherever_it_comes_to_lie():
    """The memory that the first leaves would be the second's, were it not held."""
    weight = nn.Parameter(torch.ones(5000))
    watch = Watch([weight])
    for _ in range(20):
        assert watch.changed()
        assert not watch.changed()
        weight.data = torch.ones(1)
        weight.data = torch.ones(5000)


@torch.no_grad()
def test_what_torch_does_not_count_is_seen_after_a_refresh():
    model, tokens = made("k3"), torch.tensor([[3]])
    decoder = NativeDecoder.of(model)
    assert decoder is not None
    decoder.step(tokens, states(model, 1)[0])
    model.lm_head.weight.detach().numpy()[:] *= 2
    model.norm.weight.data.mul_(2)
    decoder.refresh()
    ours, theirs = states(model, 1)
    want = model.logits(model(tokens, theirs)[:, -1])
    torch.testing.assert_close(decoder.step(tokens, ours), want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_nothing_is_copied_while_nothing_changes():
    model, tokens = made("llama"), torch.tensor([[3]])
    decoder = NativeDecoder.of(model)
    assert decoder is not None
    state = states(model, 1)[0]
    decoder.step(tokens, state)
    copies = decoder._copies
    decoder.step(tokens, state)
    assert decoder._copies is copies


def test_unknown_formats_are_refused_by_name():
    with pytest.raises(UserError, match="weights 'fp3': not one of float32, bf16, w16a16, int8, mxfp4"):
        NativeDecoder.of(made("llama"), "fp3")


@torch.inference_mode()
def test_weights_that_torch_keeps_no_count_of_are_read_at_every_step():
    model = made("hybrid")
    decoder = NativeDecoder.of(model)
    assert decoder is not None
    tokens = torch.tensor([[3], [5]])
    for change in (lambda p: p.mul_(1.1), lambda p: setattr(p, "data", p.data * 0.9)):
        for p in model.parameters():
            change(p)
        ours, theirs = states(model, 2)
        want = model.logits(model(tokens, theirs)[:, -1])
        torch.testing.assert_close(decoder.step(tokens, ours), want, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_full_state_is_refused_before_anything_is_written():
    model = made("llama")
    decoder = NativeDecoder.of(model)
    assert decoder is not None
    state = SequenceState.new(model.config, 1, 16, torch.float32)
    model(torch.arange(16).unsqueeze(0), state)
    with pytest.raises(ValueError, match="room for 16 positions"):
        decoder.step(torch.tensor([[5]]), state)


def test_other_dtypes_stay_with_torch():
    assert NativeDecoder.of(made("llama").double()) is None


def test_the_engine_writes_the_same_tokens_either_way():
    model = made("hybrid")
    written = []
    for switch in (True, False):
        engine = Engine(model, native=switch)
        for i in range(5):
            engine.submit(Request(f"r{i}", tuple(range(1, 4 + i)), 20))
        written.append({c.id: c.tokens for c in engine.run()})
    assert written[0] == written[1]
