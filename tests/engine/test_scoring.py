"""engine/scoring.py: the log-probs of given tokens are those of one plain forward, and of sampling them."""

from __future__ import annotations

import pytest
import tiny
import torch

from nonet.engine import Engine, scoring
from nonet.engine.scoring import Passage, features, likeliest, score
from nonet.types import Request, Sampling, UserError


def passages(*lengths: int, first: int = 2) -> list[Passage]:
    return [Passage(tuple(tiny.tokens(n, seed=n).tolist()), first) for n in lengths]


def plainly(model, passage: Passage, temperature: float) -> list[float]:
    with torch.no_grad():
        logp = (model.logits(model(torch.tensor([passage.tokens])))[0] / temperature).log_softmax(-1)
    at = range(passage.first, len(passage.tokens))
    return [float(logp[t - 1, passage.tokens[t]]) for t in at]


@pytest.mark.parametrize("kind", ["hybrid", "gqa", "k3"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_a_plain_forward(kind, deterministic, temperature, monkeypatch):
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 40)  # several batches, some of several passages
    monkeypatch.setattr(scoring, "_LOGITS", 61 * 3)
    model, asked = tiny.model(kind), passages(19, 5, 33, 5, 12)
    found = score(model, asked, temperature, deterministic)
    for p, logprobs in zip(asked, found, strict=True):
        assert logprobs == pytest.approx(plainly(model, p, temperature), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_alone_a_token_scores_what_it_was_sampled_at_to_the_last_bit(temperature):
    model = tiny.model("hybrid")
    engine = Engine(model, deterministic=True)
    prompt = tuple(tiny.tokens(9).tolist())
    engine.submit(Request("a", prompt, 40, sampling=Sampling(temperature=temperature)))
    (said,) = engine.run()
    assert score(model, [Passage(prompt + said.tokens, 9)], temperature, True)[0] == list(said.logprobs)


def test_the_whole_passage_is_judged_but_its_first_token():
    (p,) = passages(7, first=1)
    assert len(score(tiny.model(), [p])[0]) == 6


def test_a_passage_in_which_nothing_is_judged_has_no_scores():
    assert score(tiny.model(), passages(7, first=7)) == [[]]
    assert score(tiny.model(), []) == []


def test_features_and_head_make_the_logits():
    model, asked = tiny.model("k3"), passages(19, 5)
    for p, seen_ND in zip(asked, features(model, asked), strict=True):
        logp = model.lm_head(seen_ND).log_softmax(-1)
        assert logp.requires_grad and not seen_ND.requires_grad
        picked = logp.gather(1, torch.tensor(p.tokens[p.first :])[:, None])[:, 0]
        assert picked.tolist() == pytest.approx(plainly(model, p, 1.0), abs=1e-5)


def test_top_lists_the_likeliest_first():
    model, (p,) = tiny.model(), passages(9)
    found = likeliest(model, p, 3)
    assert [len(t) for t in found] == [3] * 7
    with torch.no_grad():
        logp = model.logits(model(torch.tensor([p.tokens])))[0].log_softmax(-1)
    for t, tokens in enumerate(found):
        values, ids = logp[t + 1].topk(3)
        assert [i for i, _ in tokens] == ids.tolist()
        assert [v for _, v in tokens] == pytest.approx(values.tolist(), abs=1e-5)


def test_more_tokens_than_the_model_has_positions_are_refused():
    model = tiny.model("gqa", max_position=16)
    with pytest.raises(UserError, match="a passage of 17 tokens: the model reads 1 to 16"):
        score(model, passages(17))


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="a passage with tokens 3 to 61: the model's vocabulary has 61"):
        score(tiny.model(), [Passage((3, 61), 1)])


def test_the_engine_scores_beside_its_requests_and_remembers_nothing():
    model = tiny.model("hybrid")
    engine = Engine(model)
    engine.submit(Request("a", tuple(tiny.tokens(9).tolist()), 12))
    before = engine.step()
    tokens = tuple(tiny.tokens(20, seed=3).tolist())
    told = engine.score(tokens, 2)
    assert told.tokens == tokens and told.finish_reason == "length" and told.logprobs[0] == 0
    assert list(told.logprobs[1:]) == score(model, [Passage(tokens, 1)])[0]
    assert [len(t) for t in told.top_logprobs] == [0, *[2] * 19]
    alone = Engine(model)
    alone.submit(Request("a", tuple(tiny.tokens(9).tolist()), 12))
    assert before + engine.run() == alone.run()
