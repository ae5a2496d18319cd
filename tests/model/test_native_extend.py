"""A few tokens at once in C: what one at a time gives, to the last bit, and what torch gives."""

from __future__ import annotations

import pytest
import torch
from every_layer import MODELS, made, states, twin
from torch import Tensor

from nonet import native
from nonet.model import Model, SequenceState
from nonet.model.native_decode import NativeDecoder
from nonet.model.taps import Taps

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=f"no native library: {native.reason()}")


def decoder_of(model: Model, weights: str = "float32") -> NativeDecoder:
    decoder = NativeDecoder.of(model, weights)
    assert decoder is not None
    return decoder


def fed(model: Model, rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, model.config.vocab_size, (rows, tokens), generator=generator)


def one_by_one(decoder: NativeDecoder, tokens_BT: Tensor, state: SequenceState) -> Tensor:
    return torch.stack([decoder.step(tokens_BT[:, t : t + 1], state) for t in range(tokens_BT.shape[1])], 1)


def assert_same_memory(a: SequenceState, b: SequenceState) -> None:
    for ours, theirs in zip(a.layers, b.layers, strict=True):
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 2), (1, 5), (4, 5), (21, 3), (70, 2), (2, 16), (3, 20)])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_and_state_are_those_of_torch(name, rows, tokens, together):
    model = made(name)
    decoder = decoder_of(model)
    decoder.stack.together = together
    ours, theirs = states(model, rows)
    tokens_BT = fed(model, rows, tokens)
    got = decoder.extend(tokens_BT, ours).log_softmax(-1)
    want = model.logits(model(tokens_BT, theirs)).log_softmax(-1)
    # On a grid of inputs, another order of summation may carry a value across a midpoint: one step of E4M3 more.
    torch.testing.assert_close(got, want, atol=2e-2 if model.config.quant else 2e-5, rtol=0)
    assert float((got - want).abs().median()) < 2e-6
    assert torch.equal(ours.lengths_B, theirs.lengths_B)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for key in mine:
            torch.testing.assert_close(mine[key], other[key], atol=2e-2 if model.config.quant else 5e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", ["float32", "bf16", "w16a16", "int8", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_run_of_tokens_is_one_token_at_a_time_to_the_last_bit(name, weights, threads):
    model = made(name)
    decoder = decoder_of(model, weights)
    for rows, tokens, together in ((1, 5, True), (3, 4, False), (21, 3, True), (2, 18, False), (1, 27, True)):
        ours, theirs = states(model, rows)
        tokens_BT = fed(model, rows, tokens)
        decoder.stack.together = together
        got = decoder.extend(tokens_BT, ours)
        decoder.stack.together = None
        assert torch.equal(got, one_by_one(decoder, tokens_BT, theirs))
        assert_same_memory(ours, theirs)


@torch.inference_mode()
def test_more_tokens_than_threads_carry_at_once_are_carried_in_parts(threads):
    for name in ("llama", "odd"):
        model = made(name)
        decoder = decoder_of(model)
        tokens_BT = fed(model, 2, 150)
        theirs = SequenceState.new(model.config, 2, 160, torch.float32)
        want = one_by_one(decoder, tokens_BT, theirs)
        for together in (False, True):
            ours = SequenceState.new(model.config, 2, 160, torch.float32)
            decoder.stack.together = together
            assert torch.equal(decoder.extend(tokens_BT, ours), want)
            assert_same_memory(ours, theirs)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["hybrid", "k3", "kimi-linear", "odd"])
@torch.inference_mode()
def test_a_slot_after_each_token_is_the_state_after_as_many_tokens(name, together, threads):
    model = made(name)
    decoder = decoder_of(model)
    decoder.stack.together = together
    rows, tokens = 3, 4
    ours, theirs = states(model, rows)
    ours.memory.grow(ours.memory.pages, rows + rows * tokens)
    after_BT = (rows + torch.randperm(rows * tokens, generator=torch.Generator().manual_seed(1))).view(rows, tokens)
    tokens_BT = fed(model, rows, tokens)
    before = [{name: pool[:rows].clone() for name, pool in layer.items()} for layer in ours.layers]
    decoder.extend(tokens_BT, ours, after_BT)
    for j in range(tokens):
        decoder.step(tokens_BT[:, j : j + 1], theirs)
        for mine, other, was in zip(ours.layers, theirs.layers, before, strict=True):
            for key in mine.keys() & {"matrix", "tail"}:
                assert torch.equal(mine[key][after_BT[:, j]], other[key]), (key, j)
                assert torch.equal(mine[key][:rows], was[key])


@torch.inference_mode()
def test_going_back_to_a_slot_and_a_length_forgets_the_tokens_behind():
    model = made("k3")
    decoder = decoder_of(model)
    ours, theirs = states(model, 2)
    ours.memory.grow(ours.memory.pages, 2 + 6)
    after_BT = torch.arange(2, 8).view(2, 3)
    wrong_BT, right_BT = fed(model, 2, 3), fed(model, 2, 5)
    wrong_BT[:, 0] = right_BT[:, 0]
    decoder.extend(wrong_BT, ours, after_BT)
    ours.lengths_B -= 2
    ours.slot_B = after_BT[:, 0]
    decoder.step(right_BT[:, :1], theirs)
    assert torch.equal(decoder.extend(right_BT[:, 1:], ours), one_by_one(decoder, right_BT[:, 1:], theirs))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_taps_are_those_of_torch(name, together):
    model = made(name)
    decoder = decoder_of(model)
    decoder.stack.together = together
    ours, theirs = states(model, 5)
    tokens_BT = fed(model, 5, 4)
    mine, other = Taps(range(len(model.layers) + 1)), Taps(range(len(model.layers) + 1))
    decoder.extend(tokens_BT, ours, taps=mine)
    model(tokens_BT, theirs, taps=other)
    scale = float(other.features_BTF.abs().max())
    close = 2e-2 if model.config.quant else 2e-5
    torch.testing.assert_close(mine.features_BTF, other.features_BTF, atol=close * scale, rtol=0)
    some = Taps((1, 3))
    decoder.extend(tokens_BT, states(model, 5)[0], taps=some)
    d = model.config.d_model
    assert torch.equal(some.features_BTF, mine.features_BTF.unflatten(-1, (-1, d))[:, :, [1, 3]].flatten(2))


@pytest.mark.parametrize("weights", ["bf16", "int8", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_weights_in_fewer_bits_are_a_torch_model_with_rounded_weights(name, weights):
    model = made(name)
    decoder, reference = decoder_of(model, weights), twin(model, weights)
    ours, theirs = states(reference, 4)
    tokens_BT = fed(model, 4, 5)
    want = reference.logits(reference(tokens_BT, theirs)).log_softmax(-1)
    got = decoder.extend(tokens_BT, ours).log_softmax(-1)
    # The processor's products of bfloat16 pairs take activations to 16 bits (native/pairs.h).
    close = 2e-2 if model.config.quant else 5e-5 if weights == "bf16" else 2e-5
    torch.testing.assert_close(got, want, atol=close, rtol=0)


@torch.inference_mode()
def test_a_run_that_does_not_fit_is_refused_before_anything_is_written():
    model = made("llama")
    decoder = decoder_of(model)
    state = SequenceState.new(model.config, 1, 16, torch.float32)
    model(torch.arange(14).unsqueeze(0), state)
    was = [{name: pool.clone() for name, pool in layer.items()} for layer in state.layers]
    with pytest.raises(ValueError, match="room for 16 positions, this call needs 17"):
        decoder.extend(torch.tensor([[5, 6, 7]]), state)
    assert int(state.lengths_B) == 14
    assert all(torch.equal(a[k], b[k]) for a, b in zip(was, state.layers, strict=True) for k in a)
