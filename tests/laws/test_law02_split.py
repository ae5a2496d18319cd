"""Law 2: splitting a forward anywhere changes nothing, for every kind of layer memory, ragged or not."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import tiny
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from nonet.model import Model, Rope, SequenceState
from nonet.model.state import Memory

T, VOCAB = 23, 61
MODELS = {
    "hybrid": dict(kind="hybrid"),
    "hybrid without mla": dict(kind="hybrid", layers=2, mixers=("kda", "kda")),
    "gqa, llama3 rope, qk norm": dict(kind="gqa"),
    "gqa, linear rope, one kv head": dict(
        kind="gqa", rope=Rope(scaling="linear", factor=3.0), qk_norm=False, kv_heads=1
    ),
    "k3": dict(kind="k3"),
    "kimi-linear": dict(kind="kimi_linear"),
    "rope in mla, no convolution": dict(kind="hybrid", mla_rope=Rope(theta=50.0), conv_kernel=1),
    "everything": dict(kind="gqa", layers=3, mixers=("gqa", "mla", "kda"), kda_head_dim=8, decay_rank=4),
}
every_model = pytest.mark.parametrize("name", MODELS)
EXACT = dict(rtol=1e-9, atol=1e-9)
CLUTTER = 1e3


@cache
def model(name: str) -> Model:
    return tiny.model(**MODELS[name], vocab=VOCAB, dtype=torch.float64)


@cache
def whole(name: str) -> Tensor:
    """hidden_TD of the reference sequence, in one forward without a state."""
    with torch.no_grad():
        return model(name)(tiny.tokens(1, T, vocab=VOCAB))[0]


def empty(m: Model, batch: int, capacity: int) -> SequenceState:
    """A state whose free slots hold clutter, as after other requests; masks must never let it through."""
    state = SequenceState.new(m.config, batch, capacity, torch.float64)
    for layer in state.layers:
        for name in layer.keys() & {"k", "v", "latent"}:
            layer[name].fill_(CLUTTER)
    return state


@every_model
@given(cuts=st.sets(st.integers(1, T - 1), max_size=6))
@example(cuts=set(range(1, T)))
@example(cuts={T - 1})
def test_any_cuts_give_the_same_hidden_states(name, cuts):
    m, tokens = model(name), tiny.tokens(1, T, vocab=VOCAB)
    edges = [0, *sorted(cuts), T]
    state = empty(m, 1, T)
    with torch.no_grad():
        pieces = [m(tokens[:, a:b], state) for a, b in pairwise(edges)]
    torch.testing.assert_close(torch.cat(pieces, 1)[0], whole(name), **EXACT)


@every_model
def test_long_pieces_of_long_prompts_give_the_same_hidden_states(name):
    """From 32 queries on, MLA materialises the keys and values of what it remembers."""
    m, tokens = model(name), tiny.tokens(1, 130, vocab=VOCAB)
    state = empty(m, 1, 130)
    with torch.no_grad():
        pieces = [m(tokens[:, a:b], state) for a, b in pairwise((0, 40, 75, 90, 130))]
        torch.testing.assert_close(torch.cat(pieces, 1), m(tokens), **EXACT)


@st.composite
def plans(draw) -> list[list[int]]:
    """Per call, how many real tokens each of three rows gets (zero allowed)."""
    calls = draw(st.integers(1, 5))
    return draw(st.lists(st.tuples(*[st.integers(0, 4)] * 3).map(list), min_size=calls, max_size=calls))


@every_model
@given(plan=plans(), spare=st.sampled_from([0, 1, 9]))
@example(plan=[[4, 4, 4], [4, 1, 0], [3, 4, 2], [0, 0, 4]], spare=0)
@example(plan=[[2, 1, 1], [2, 3, 1]], spare=0)  # padding beside a real token in the last slot
def test_ragged_batches_with_right_padding_and_no_room_to_spare(name, plan, spare):
    """Each row of a padded batch must live as if alone; capacity is what the longest row needs, plus `spare`."""
    plan = [call for call in plan if max(call)]
    if not plan:
        return
    m, tokens = model(name), tiny.tokens(1, T, vocab=VOCAB)[0]
    capacity = max(sum(call[b] for call in plan) for b in range(3)) + spare
    state, fed, seen = empty(m, 3, capacity), [0, 0, 0], [[], [], []]
    for call in plan:
        padded = torch.full((3, max(call)), VOCAB - 1)
        for b, n in enumerate(call):
            padded[b, :n] = tokens[fed[b] : fed[b] + n]
        with torch.no_grad():
            hidden = m(padded, state, torch.tensor(call))
        for b, n in enumerate(call):
            seen[b].append(hidden[b, :n])
            fed[b] += n
    assert state.lengths_B.tolist() == fed
    for b in range(3):
        torch.testing.assert_close(torch.cat(seen[b]), whole(name)[: fed[b]], **EXACT)


@every_model
def test_padding_is_invisible_without_a_state(name):
    m, tokens = model(name), tiny.tokens(3, T, vocab=VOCAB)
    counts = torch.tensor([T, 5, 12])
    with torch.no_grad():
        junk = torch.where(torch.arange(T) < counts[:, None], tokens, 7)
        hidden = m(junk)
        for b, n in enumerate(counts.tolist()):
            torch.testing.assert_close(hidden[b, :n], m(tokens[b : b + 1, :n])[0], **EXACT)


# ------------------------------------------------- states are moved around while sequences grow


def grown(m: Model, lengths: list[int], capacity: int = T) -> SequenceState:
    """One row per length, each holding that many tokens of the reference sequence."""
    tokens = tiny.tokens(1, T, vocab=VOCAB)[0]
    state = empty(m, len(lengths), capacity)
    padded = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for b, n in enumerate(lengths):
        padded[b, :n] = tokens[:n]
    with torch.no_grad():
        m(padded, state, torch.tensor(lengths))
    return state


def assert_continues(name: str, state: SequenceState, lengths: list[int]) -> None:
    """Feeding each row its next two tokens gives the reference hidden states."""
    assert state.lengths_B.tolist() == lengths
    tokens = tiny.tokens(1, T, vocab=VOCAB)[0]
    with torch.no_grad():
        hidden = model(name)(torch.stack([tokens[n : n + 2] for n in lengths]), state)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(hidden[b], whole(name)[n : n + 2], **EXACT)


@every_model
@given(order=st.permutations(range(12)), slots=st.permutations(range(5)), cut=st.integers(1, T - 2))
def test_which_pages_and_slots_a_row_gets_does_not_matter(name, order, slots, cut):
    m, tokens = model(name), tiny.tokens(1, T, vocab=VOCAB)
    memory = Memory(m.config, 12, 5, torch.float64)
    table_BP, slot_B = torch.tensor(order).view(3, 4)[:, :2], torch.tensor(slots[:3])
    state = SequenceState(memory, table_BP, slot_B, torch.zeros(3, dtype=torch.long))
    with torch.no_grad():
        counts = torch.tensor([cut, cut // 2, cut + 1])
        m(tokens.expand(3, T)[:, : cut + 1], state, counts)
        for b, n in enumerate(counts.tolist()):
            rest = m(tokens[:, n:], state.rows(b, b + 1))
            torch.testing.assert_close(rest[0], whole(name)[n:], **EXACT)


@every_model
def test_a_memory_grows_without_forgetting_and_copies_are_independent(name):
    m, tokens = model(name), tiny.tokens(1, T, vocab=VOCAB)
    state = grown(m, [9])
    state.dense = False  # only memories that are exactly their rows can be read without gathering
    state.memory.grow(5, 3)
    state.memory.copy_page(0, 4)
    state.memory.copy_slot(0, 2)
    copy = SequenceState(state.memory, torch.tensor([[4, 3]]), torch.tensor([2]), torch.tensor([9]))
    with torch.no_grad():
        m(tokens[:, :9].flip(1), state)  # the original goes elsewhere
        torch.testing.assert_close(m(tokens[:, 9:], copy)[0], whole(name)[9:], **EXACT)


@every_model
@pytest.mark.parametrize("written", [1, 2, 3, 4])
def test_any_of_the_states_between_tokens_can_be_gone_back_to(name, written):
    """Four tokens at once, of which only the first `written` turn out to be right."""
    m, tokens = model(name), tiny.tokens(1, T, vocab=VOCAB)
    state = grown(m, [5, 3])
    state.dense = False
    state.memory.grow(0, 8)
    state.after_BT = torch.tensor([[2, 3, 4, 0], [5, 6, 7, 1]])  # the last in the sequence's own slot
    right = torch.stack([tokens[0, n : n + 4] for n in (5, 3)])
    with torch.no_grad():
        hidden = m(torch.cat([right[:, :written], right[:, written:].flip(1) + 1], 1).clamp_max(VOCAB - 1), state)
    for b, n in enumerate((5, 3)):
        torch.testing.assert_close(hidden[b, :written], whole(name)[n : n + written], **EXACT)
    back = SequenceState(state.memory, state.table_BP, state.after_BT[:, written - 1], state.lengths_B - 4 + written)
    assert_continues(name, back, [5 + written, 3 + written])


@every_model
def test_rows_are_a_view(name):
    state = grown(model(name), [3, 9, 6])
    assert_continues(name, state.rows(1, 3), [9, 6])
    assert state.lengths_B.tolist() == [3, 11, 8]
    assert_continues(name, state, [3, 11, 8])


def test_a_state_without_room_is_refused():
    m = model("hybrid")
    state = grown(m, [4], capacity=6)  # whole pages: 16
    with pytest.raises(ValueError, match="room for 16 positions, this call needs 17"):
        m(tiny.tokens(1, 13), state)


def test_state_size_is_the_config_arithmetic():
    for name in MODELS:
        config, cost = model(name).config, model(name).cost
        small, large = (SequenceState.new(config, 2, n, torch.float32) for n in (16, 80))
        assert large.bytes - small.bytes == 2 * 64 * cost.bytes_per_token()
        assert small.bytes == 2 * (16 * cost.bytes_per_token() + cost.bytes_per_state())
