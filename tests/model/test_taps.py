"""What a tap holds: transformers' hidden states in a plain decoder, the mixture of its site in one with attention
residuals.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from nonet.model import Model, SequenceState, hf
from nonet.model.taps import Taps, checked_taps
from nonet.types import UserError


def tapped(model: Model, layers: tuple[int, ...], ids: torch.Tensor, **more) -> tuple[torch.Tensor, list[torch.Tensor]]:
    taps = Taps(layers)
    with torch.no_grad():
        hidden = model(ids, taps=taps, **more)
    return hidden, list(taps.features_BTF.split(model.config.d_model, -1))


def test_taps_of_a_llama_are_transformers_hidden_states(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = tiny.tokens(2, 19)
    with torch.no_grad():
        want = theirs.model(ids, output_hidden_states=True).hidden_states
    model = hf.load(tmp_path)
    hidden, parts = tapped(model, (0, 1, 2, 3, 4), ids)
    for k in range(4):
        torch.testing.assert_close(parts[k], want[k], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.norm(parts[4]), want[4], atol=1e-5, rtol=1e-5)  # theirs is after the norm
    assert torch.equal(parts[4], hidden)


def test_taps_under_attention_residuals_are_the_mixtures_that_layers_read():
    """By hand, from what every sublayer put out (k3 section 1.4)."""
    model, ids = tiny.model("k3"), tiny.tokens(1, 13)
    outputs: list[torch.Tensor] = []
    for layer in model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_hook(lambda _, __, out: outputs.append(out.double()))
    L, size = model.config.layers, model.config.attn_res_block
    hidden, parts = tapped(model, tuple(range(L + 1)), ids)

    def mixture(sources: list[torch.Tensor], site) -> torch.Tensor:
        query = (site.proj.weight[0] * site.norm.weight).double()
        v = torch.stack(sources)
        scores = (v * query).sum(-1) / (v.pow(2).mean(-1) + site.norm.eps).sqrt()
        return (scores.softmax(0).unsqueeze(-1) * v).sum(0)

    banked, running = [], model.embed_tokens(ids).double()
    for i, layer in enumerate(model.layers):
        want = mixture([*banked, running], layer.self_attention_res) if banked else running
        torch.testing.assert_close(parts[i].double(), want, atol=1e-5, rtol=1e-5)
        added = outputs[2 * i] + outputs[2 * i + 1]
        if i % size == 0:
            banked.append(running)
            running = added
        else:
            running = running + added
    want = mixture([*banked, running], model.output_attn_res)
    torch.testing.assert_close(parts[L].double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(parts[L], hidden)


@pytest.mark.parametrize("kind", ["gqa", "k3"])
def test_taps_are_the_same_batched_padded_and_through_a_state(kind: str):
    model, ids = tiny.model(kind), tiny.tokens(3, 24)
    layers = (0, 1, model.config.layers)
    counts = torch.tensor([24, 9, 17])
    _, padded = tapped(model, layers, ids, counts_B=counts)
    state = SequenceState.new(model.config, 3, 32, torch.float32)
    _, first = tapped(model, layers, ids[:, :7], state=state)
    _, rest = tapped(model, layers, ids[:, 7:], state=state, counts_B=counts - 7)
    for b, n in enumerate(counts.tolist()):
        _, alone = tapped(model, layers, ids[b : b + 1, :n])
        for tap in range(len(layers)):
            torch.testing.assert_close(padded[tap][b, :n], alone[tap][0], atol=2e-5, rtol=2e-5)
            split = torch.cat([first[tap], rest[tap]], 1)
            torch.testing.assert_close(split[b, :n], alone[tap][0], atol=2e-5, rtol=2e-5)


def test_tapping_changes_nothing_and_keeps_no_graph():
    model, ids = tiny.model("k3"), tiny.tokens(1, 8)
    taps = Taps((2, 6))
    assert torch.equal(model(ids, taps=taps), model(ids))
    assert not taps.features_BTF.requires_grad


@pytest.mark.parametrize("bad", [(), (1, 1, 2), (2, 1), (-1, 2), (0, 7)])
def test_bad_taps_are_refused(bad: tuple[int, ...]):
    with pytest.raises(UserError, match="taps"):
        checked_taps(bad, 6)


def test_the_embedding_and_the_last_hidden_state_are_taps():
    assert checked_taps([0, 3, 6], 6) == (0, 3, 6)
