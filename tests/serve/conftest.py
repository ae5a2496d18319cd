"""A model directory with a template that knows tools, the same tokenizer for fakes, and one server process for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from nonet.chat import Tokenizer
from nonet.model import hf

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))
import running
import templates

CONTEXT = 256


@pytest.fixture(scope="session")
def toolful(nano: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return templates.with_template(nano.directory, templates.TOOLS, tmp_path_factory.mktemp("toolful"))


@pytest.fixture(scope="session")
def served(toolful: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `nonet serve` on a small random model, named tiny; its context is CONTEXT."""
    out = tmp_path_factory.mktemp("served")
    hf.save(tiny.model(vocab=toolful.vocab_size, max_position=CONTEXT), out)
    hf.copy_tokenizer(toolful.directory, out)
    with running.process(["-m", "nonet.cli", "serve", out, "--port", "0", "--name", "tiny"]) as (_, url):
        running.wait_until_ready(url)
        yield url
