"""Scoring over HTTP, and the teacher that asks for it: ids in, the model's own log-probs out."""

from __future__ import annotations

from pathlib import Path

import httpx2
import openai
import pytest
import tiny

from nonet.chat import Tokenizer
from nonet.chat.training import train as train_tokenizer
from nonet.engine.scoring import Passage, score
from nonet.rl.endpoint import Endpoint
from nonet.rl.served import ServedTeacher
from nonet.types import UserError

PASSAGES = [Passage(tuple(tiny.tokens(n, vocab=250, seed=n).tolist()), 4) for n in (30, 7, 12, 9, 9, 40, 5, 6, 8, 31)]


@pytest.fixture
def model(toolful):
    """As the server's (conftest.served)."""
    return tiny.model(vocab=toolful.vocab_size, max_position=256)


def refused(url: str, **body) -> str:
    answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "hello", **body})
    assert answer.status_code == 400
    return answer.json()["error"]["message"]


def test_a_prompt_is_scored_and_nothing_is_written(served, toolful, model):
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)
    ids = toolful.encode("hello there, hello")
    told = client.completions.create(model="tiny", prompt=[ids, ids[:1]], max_tokens=0, echo=True, logprobs=2)
    whole, one = told.choices
    assert whole.text == "hello there, hello" and told.usage.completion_tokens == 0
    assert told.usage.prompt_tokens == len(ids) + 1
    assert whole.logprobs.tokens == [toolful.decode([i]) for i in ids]
    first, *rest = whole.logprobs.token_logprobs
    assert first is None and rest == pytest.approx(score(model, [Passage(tuple(ids), 1)])[0], abs=1e-4)
    assert one.logprobs.token_logprobs == [None] and one.logprobs.top_logprobs == [None]
    assert all(len(top) <= 2 for top in whole.logprobs.top_logprobs[1:])
    assert "".join(whole.logprobs.tokens)[whole.logprobs.text_offset[3] :].startswith(whole.logprobs.tokens[3])


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 0, "logprobs": 0},
        {"max_tokens": 4, "echo": True, "logprobs": 0},
        {"echo": True, "logprobs": 0},
        {"max_tokens": 0, "echo": True, "logprobs": 0, "n": 2},
        {"max_tokens": 0, "echo": True, "logprobs": 0, "stream": True},
    ],
)
def test_scoring_and_answering_are_not_mixed(served, body):
    assert refused(served, **body).startswith("max_tokens: 0 scores the prompt, which takes echo and logprobs")


def test_what_the_model_cannot_read_is_refused(served):
    scoring = {"max_tokens": 0, "echo": True, "logprobs": 0}
    assert "the model reads 1 to 256" in refused(served, prompt=[5] * 257, **scoring)
    assert "the model's vocabulary has" in refused(served, prompt=[5, 99_999], **scoring)
    assert "the model reads 1 to 256" in refused(served, prompt="", **scoring)


def test_a_scored_prompt_is_counted(served):
    before, after = (_counted(served) for _ in range(2))
    httpx2.post(f"{served}/v1/completions", json={"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0})
    assert before == after == _counted(served) - 1


def _counted(url: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    name = 'nonet_requests_total{outcome="scored",route="/v1/completions"}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


# --------------------------------------------------------------------- the teacher


def test_a_served_teacher_says_what_a_local_one_would(served, model):
    teacher = ServedTeacher(f"{served}/v1")
    assert Endpoint(f"{served}/v1").model == "tiny"
    for told, local in zip(teacher.logprobs(PASSAGES, 1.0), score(model, PASSAGES), strict=True):
        assert told == pytest.approx(local, abs=1e-4)


def test_a_served_teacher_has_one_temperature(served):
    """verl#5592: a teacher that ignores the temperature of the student."""
    with pytest.raises(UserError, match=r"scores at temperature 1 and the student samples at 0\.6"):
        ServedTeacher(f"{served}/v1").logprobs(PASSAGES, 0.6)


def test_its_vocabulary_is_compared_text_by_text(served, toolful, tmp_path):
    """trl#4562: a teacher fed with foreign ids."""
    ServedTeacher(f"{served}/v1").require_vocabulary(toolful, "expert agents:low")
    with pytest.raises(UserError, match=r"expert agents:low = http.*another vocabulary: id \d+ is"):
        ServedTeacher(f"{served}/v1").require_vocabulary(other_words(tmp_path), "expert agents:low")


def other_words(folder: Path) -> Tokenizer:
    train_tokenizer([f"{a}{b} zebra quartz" for a in "uvwxyz" for b in "uvwxyz"] * 40, 290, folder)
    return Tokenizer(folder)


def test_a_model_is_named_where_the_server_has_another(served):
    with pytest.raises(UserError, match=r"404: .*ask for 'tiny'"):
        ServedTeacher(f"{served}/v1#huge").logprobs(PASSAGES[:1], 1.0)


def test_no_server_is_one_sentence():
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1#any: no answer .*is the server up\?"):
        ServedTeacher("http://x", Endpoint("http://127.0.0.1:9/v1#any", patience_s=0.001)).logprobs(PASSAGES[:1], 1.0)


class Fake:
    """Answers by turn."""

    def __init__(self, *answers: httpx2.Response):
        self.answers = list(answers)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        return self.answers.pop(0)


def faked(*answers: httpx2.Response) -> ServedTeacher:
    where = "http://fake/v1#m"
    return ServedTeacher(where, Endpoint(where, 0.001, httpx2.MockTransport(Fake(*answers))))


def scored(*values: float | None) -> httpx2.Response:
    logprobs = {"token_logprobs": list(values), "tokens": ["x"] * len(values)}
    return httpx2.Response(200, json={"choices": [{"index": 0, "logprobs": logprobs}]})


def test_a_busy_server_is_asked_again():
    teacher = faked(httpx2.Response(503), httpx2.Response(429), scored(None, -1.0, -2.0))
    assert teacher.logprobs([Passage((1, 2, 3), 1)], 1.0) == [[-1.0, -2.0]]


def test_a_token_written_all_the_same_is_no_part_of_the_prompt():
    assert faked(scored(None, -1.0, -2.0, -9.0)).logprobs([Passage((1, 2, 3), 2)], 1.0) == [[-2.0]]


@pytest.mark.parametrize("values", [(), (None, -1.0), (None, -1.0, None)])
def test_fewer_log_probs_than_tokens_are_refused(values):
    """rllm#816: a short answer must not be filled up with zeros."""
    with pytest.raises(UserError, match="log-probs for a prompt of 3 tokens"):
        faked(scored(*values)).logprobs([Passage((1, 2, 3), 1)], 1.0)
