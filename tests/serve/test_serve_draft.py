"""`nonet serve --draft`: the same answers, and counts of what was drafted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
import running
import tiny

from nonet.chat import Tokenizer
from nonet.draft import files
from nonet.draft.config import mtp_config
from nonet.draft.model import started
from nonet.model import hf

PROMPT = "hello hello hello hello hello"


@pytest.fixture(scope="module")
def target(toolful: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random hybrid with an MTP layer."""
    out = tmp_path_factory.mktemp("target")
    hf.save(tiny.model(vocab=toolful.vocab_size, max_position=256, mtp_layers=1), out)
    hf.copy_tokenizer(toolful.directory, out)
    return out


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MTP layer as it is."""
    out, model = tmp_path_factory.mktemp("draft"), hf.load(target)
    files.save(started(mtp_config(model.config, files.vocabulary_hash(target)), model), out)
    return out


def served(target: Path, *more: str | Path) -> Iterator[openai.OpenAI]:
    command = ["-m", "nonet.cli", "serve", target, "--port", "0", "--name", "tiny", *more]
    with running.process(command) as (_, url):
        running.wait_until_ready(url)
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[openai.OpenAI]:
    yield from served(target)


@pytest.fixture(scope="module", params=["lookup", "directory"])
def drafting(target: Path, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    source = "lookup" if request.param == "lookup" else request.getfixturevalue("draft")
    yield from served(target, "--draft", source, "--draft-tokens", "3")


def test_greedy_answers_are_the_same_and_usage_says_what_was_drafted(plain, drafting):
    asked = dict(model="tiny", prompt=PROMPT, temperature=0, max_tokens=60, extra_body={"return_token_ids": True})
    found, expected = (client.completions.create(**asked) for client in (drafting, plain))
    assert found.choices[0].model_dump() == expected.choices[0].model_dump()
    details = found.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    assert 0 <= details.accepted_prediction_tokens <= found.usage.completion_tokens
    nothing = expected.usage.completion_tokens_details
    assert (nothing.accepted_prediction_tokens, nothing.rejected_prediction_tokens) == (0, 0)


def test_a_stream_is_the_whole_answer_and_metrics_count(drafting):
    asked = dict(model="tiny", prompt=PROMPT, temperature=0.8, seed=4, max_tokens=50)
    whole = drafting.completions.create(**asked)
    *events, last = drafting.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(e.choices[0].text for e in events) == whole.choices[0].text
    details = last.usage.completion_tokens_details
    text = httpx2.get(str(drafting.base_url).removesuffix("v1/") + "metrics").text
    counts = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert counts["nonet_engine_draft_proposed_total"] == counts['nonet_tokens_total{kind="drafted"}'] > 0
    assert counts["nonet_engine_draft_accepted_total"] >= details.accepted_prediction_tokens
    assert 1 <= counts["nonet_engine_draft_acceptance_length"] <= 4


@pytest.mark.parametrize("source", ["nowhere", "target"])
def test_a_draft_that_is_none_is_refused_at_start_up(target, source):
    given = target if source == "target" else Path(source)
    command = [sys.executable, "-m", "nonet.cli", "serve", str(target), "--port", "0", "--draft", str(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("nonet: ") and done.stderr.count("\n") == 1
