"""What all rooms' tests share: one thread, seeded property tests, a tokenizer and a small policy that can use tools."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import HealthCheck, settings

from nonet.chat import Tokenizer
from nonet.chat.training import train as train_tokenizer
from nonet.harness import load_spec, phrases
from nonet.model import Model, hf

# Seeded: an example that fails today fails tomorrow, and is then pasted into the test.
settings.register_profile(
    "nonet", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nonet")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The machine is shared and the models are tiny."""
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """For what must not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer trained as `nonet run` trains one, on words of two task sources."""
    out = tmp_path_factory.mktemp("nano")
    train_tokenizer(tiny.texts(), 300, out, phrases(load_spec("terse")))
    return Tokenizer(out)


@pytest.fixture(scope="session")
def policy_directory(nano: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose policy writes mostly valid answers and tool calls (it was shown a few by heart)."""
    out = tmp_path_factory.mktemp("policy")
    hf.save(tiny.drilled(nano), out)
    hf.copy_tokenizer(nano.directory, out)
    return out


@pytest.fixture(scope="session")
def _policy(policy_directory: Path) -> Model:
    return hf.load(policy_directory)


@pytest.fixture
def policy(_policy: Model) -> Model:
    """A copy of the drilled policy that the test may change."""
    return copy.deepcopy(_policy)
