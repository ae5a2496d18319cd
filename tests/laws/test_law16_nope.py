"""Law 16: NoPE. An MLA layer alone cannot tell the order of past tokens; a KDA or a rotary layer can."""

from __future__ import annotations

import pytest
import tiny
import torch

from nonet.model import SequenceState

PAST = 11


def last_hidden(mixer: str, permuted: bool, with_state: bool) -> torch.Tensor:
    """The hidden state of the same last token after the same past, in order or shuffled; one layer deep."""
    over = dict(rope=tiny.LLAMA3) if mixer == "gqa" else {}
    m = tiny.model("hybrid", dtype=torch.float64, layers=1, mixers=(mixer,), **over)
    tokens = tiny.tokens(1, PAST + 1)
    if permuted:
        order = torch.randperm(PAST, generator=torch.Generator().manual_seed(3))
        tokens = torch.cat([tokens[:, order], tokens[:, -1:]], 1)
    with torch.no_grad():
        if not with_state:
            return m(tokens)[0, -1]
        state = SequenceState.new(m.config, 1, PAST + 1, torch.float64)
        m(tokens[:, :PAST], state)
        return m(tokens[:, PAST:], state)[0, -1]


@pytest.mark.parametrize("with_state", [False, True], ids=["expanded", "absorbed"])
def test_mla_cannot_tell_the_order_of_its_past(with_state):
    straight, shuffled = (last_hidden("mla", p, with_state) for p in (False, True))
    torch.testing.assert_close(straight, shuffled, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixer", ["kda", "gqa"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "stateful"])
def test_the_other_mixers_can(mixer, with_state):
    straight, shuffled = (last_hidden(mixer, p, with_state) for p in (False, True))
    assert (straight - shuffled).abs().max() > 1e-3


def test_mla_does_see_which_tokens_its_past_holds():
    m = tiny.model("hybrid", dtype=torch.float64, layers=1, mixers=("mla",))
    tokens = tiny.tokens(1, PAST + 1)
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 61
    with torch.no_grad():
        assert (m(tokens)[0, -1] - m(other)[0, -1]).abs().max() > 1e-3
