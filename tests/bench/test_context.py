"""The context experiment: rows ask what they hide, probes see what they claim to, a stopped grid continues."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from nonet.bench import context, context_plot, context_probe
from nonet.bench.context_task import KEYS, RecallText, generator, shuffled_windows
from nonet.lm import LMConfig
from nonet.model import Model, ModelConfig


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> RecallText:
    return RecallText.made(tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (64, 1), (200, 4), (64, 0), (64, 16)])
def test_every_answer_stands_beside_its_key_once_before(task, length, pairs):
    for index in range(20):
        tokens, answers = task.recall("heldout", length, pairs, generator("x", index))
        assert len(tokens) == length and answers.sum() == pairs
        for at in np.flatnonzero(answers):
            key, value = tokens[at - 1], tokens[at]
            assert task.text_ids <= key < task.text_ids + KEYS <= value < task.vocab_size
            [first] = np.flatnonzero(tokens[: length - 2 * pairs] == key)
            assert tokens[first + 1] == value
        text = tokens[tokens < task.text_ids]
        assert len(text) == length - 4 * pairs


def test_needles_lie_anywhere(task):
    places = []
    for index in range(200):
        tokens, _ = task.recall("train", 64, 1, generator("x", index))
        places.append(int(np.flatnonzero(tokens >= task.text_ids)[0]))
    assert min(places) < 6 and max(places) > 54


def test_rows_are_a_function_of_their_index_and_held_out_text_is_not_trained_on(task):
    one, other = task.training_rows(64, 3, 10, 4), task.training_rows(64, 3, 8, 4)
    assert one[:2] == other[2:] and one[0] != task.training_rows(64, 4, 10, 1)[0]
    assert not set(task.splits["train"].tolist()) & set(task.splits["heldout"].tolist())
    a, b = task.test_rows(64, 2, 3), task.test_rows(64, 2, 3)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_training_masks_hold_every_answer_and_some_text(task):
    rows = task.training_rows(64, 0, 0, 200)
    ids = np.array([r.tokens for r in rows])
    mask = np.array([r.mask for r in rows])
    is_text = ids < task.text_ids
    assert 0.07 < mask[is_text].mean() < 0.13
    values = ids >= task.text_ids + KEYS
    assert mask[~is_text & ~values].sum() == 0  # keys are not to be guessed
    assert mask[values].sum() == values.sum() / 2  # of each value's two places, the second


def test_shuffling_stays_inside_its_window_and_spares_the_end():
    rows = np.arange(40).reshape(1, 40).repeat(3, 0)
    out = shuffled_windows(rows, 8, 10, 0)
    assert np.array_equal(out[:, 30:], rows[:, 30:])
    for a in range(0, 30, 8):
        assert np.array_equal(np.sort(out[:, a : min(a + 8, 30)], 1), rows[:, a : min(a + 8, 30)])
    assert not np.array_equal(out, rows) and not np.array_equal(out[0], out[1])
    assert np.array_equal(shuffled_windows(rows, 1, 10, 0), rows)


class Oracle(torch.nn.Module):
    """Repeats what followed the same token earlier; sure of it."""

    def __init__(self, vocab: int):
        super().__init__()
        self.vocab = vocab

    def forward(self, tokens):
        guess = torch.zeros(*tokens.shape, dtype=torch.long)
        for b, row in enumerate(tokens.tolist()):
            for t, token in enumerate(row):
                earlier = [s for s in range(t) if row[s] == token]
                guess[b, t] = row[earlier[-1] + 1] if earlier else 0
        return torch.nn.functional.one_hot(guess, self.vocab).float() * 20

    def logits(self, hidden):
        return hidden


def test_a_model_that_looks_up_recalls_all_and_one_that_guesses_nothing(task, monkeypatch):
    monkeypatch.setattr(context_probe, "ROWS", 8)
    assert context_probe.recalled(Oracle(task.vocab_size), task, 64, 4) == 1.0
    guessing = Model(ModelConfig(**context.SHAPE, vocab_size=task.vocab_size))
    assert context_probe.recalled(guessing, task, 64, 4) < 0.1


def test_losses_by_position_average_the_positions_they_name(monkeypatch):
    by_token = torch.arange(1, 64).float().expand(3, 63)  # the loss at position t is t
    monkeypatch.setattr(context_probe, "text_losses", lambda model, tokens: by_token)
    found = context_probe.position_losses(None, np.zeros((3, 64), int))
    assert found == {"0": 8.0, "16": 23.5, "32": 47.5}


def tiny_grid(monkeypatch, folder) -> None:
    monkeypatch.setattr(context, "FOLDER", folder)
    monkeypatch.setattr(context, "STAGES", (context.Stage(32, 3, 2, 1e-3), context.Stage(64, 2, 2, 1e-3)))
    monkeypatch.setattr(context, "LENGTHS", (32, 64))
    monkeypatch.setattr(context, "SEEDS", (0,))
    monkeypatch.setattr(context_probe, "ROWS", 2)
    monkeypatch.setattr(context_probe, "TEXT_ROWS", 2)
    monkeypatch.setattr(context_probe, "SHUFFLES", (2,))
    shape = {**context.SHAPE, "d_model": 16, "heads": 1, "d_ff": 16, "kda_head_dim": 16}
    monkeypatch.setattr(context, "SHAPE", shape)


def test_the_grid_is_run_once_and_a_stopped_one_continues(monkeypatch, tmp_path):
    tiny_grid(monkeypatch, tmp_path)
    real, trained = context.train, []

    def watched(model, rows, config: LMConfig, run, stage):
        trained.append((run.path.name, stage))
        if len(trained) == 3:
            raise KeyboardInterrupt
        real(model, rows, config, run, stage)

    monkeypatch.setattr(context, "train", watched)
    with pytest.raises(KeyboardInterrupt):
        context.measure()
    assert context.summary()["cells_done"] == 2
    found = context.measure()
    assert found["cells_done"] == found["cells"] == 12
    assert trained[3] == trained[2]  # taken up where it stopped; nothing else twice
    rest = [*trained[:2], *trained[3:]]
    assert len(set(rest)) == len(rest) == 11  # rope_retuned shares rope's first stage
    context.measure()
    assert len(trained) == 12
    assert not list(tmp_path.glob(".*.claim"))
    json.dumps(found)
    assert all("no verdict" in words for words in found["verdict"].values())
    assert "rope_retuned, before 64" in found["multi_key"] and "nope, before 64" not in found["multi_key"]


def test_two_processes_do_not_take_the_same_cell_and_a_dead_ones_claim_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(context, "FOLDER", tmp_path)
    with context.claimed("a") as mine, context.claimed("a") as other, context.claimed("b") as another:
        assert (mine, other, another) == (True, False, True)
    (tmp_path / ".a.claim").write_text(str(2**22 + 1))  # above the kernel's largest process id
    with context.claimed("a") as mine:
        assert mine


def test_retuning_keeps_the_weights_and_slows_the_slowest_pair_by_the_factor():
    m = Model(ModelConfig(**context.SHAPE, **context.VARIANTS["rope"], vocab_size=64))
    slower = context.retuned(m, 4.0)
    assert all(torch.equal(p, m.state_dict()[n]) for n, p in slower.state_dict().items())
    d = m.config.qk_rope_head_dim
    slowest = [x.config.mla_rope.theta ** (-(d - 2) / d) for x in (m, slower)]
    assert slowest[0] / slowest[1] == pytest.approx(4.0)


def test_variants_differ_only_where_they_say_and_are_about_as_large():
    sizes = {}
    for name, over in context.VARIANTS.items():
        config = ModelConfig(**{**context.SHAPE, **over}, vocab_size=600)
        assert config.model_dump(exclude=set(over)) == ModelConfig(**context.SHAPE, vocab_size=600).model_dump(
            exclude=set(over)
        )
        sizes[name] = Model(config).parameter_count()
    assert all(0.7 < n / sizes["nope"] < 1.1 for n in sizes.values())


def test_the_plot_names_every_variant_and_draws_every_stage():
    recall = {f"{v}, after {c}": {"64": 1.0, "128": 0.5} for v in ("nope", "a<b") for c in (64, 256)}
    drawn = context_plot.svg(recall, (64, 256))
    assert drawn.count("pairs recalled, trained at") == 2 and "a&lt;b" in drawn
    assert drawn.count('stroke-width="2"') == 2 * 2 + 2
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
