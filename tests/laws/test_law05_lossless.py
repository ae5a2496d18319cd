"""Law 5: drafting changes nothing about what is written: greedy and one-hot drafts not a token, sampled ones no
distribution.
"""

from __future__ import annotations

import pytest
import torch
from drafters import Echo
from engine_programs import VOCAB, checked

from nonet.draft.config import eagle3_config, mtp_config
from nonet.draft.model import started
from nonet.draft.native import drafter_of
from nonet.engine.drafter import Drafter
from nonet.engine.lookup import PromptLookup
from nonet.model import Model
from nonet.types import Request


def run(kind: str, first: int, count: int, deterministic: bool, **over) -> None:
    through = checked(kind, first, count, deterministic, **over)
    assert through["draft_accepted_total"] and through["draft_accepted_total"] < through["draft_proposed_total"]


@pytest.mark.parametrize("first", range(1000, 1040, 10))
def test_deterministic_programs_with_a_drafter_are_bitwise_what_requests_alone_write(first):
    """Right, wrong and partly right one-hot drafts, at every temperature; the drafter checks what it is told."""
    run("hybrid", first, 10, True, drafter=Echo)


@pytest.mark.parametrize(("kind", "first"), [("hybrid", 1100), ("hybrid", 1120), ("hybrid", 1140), ("gqa", 1160),
                                             ("gqa", 1180), ("k3", 1200), ("kimi_linear", 1220)])  # fmt: skip
def test_fast_programs_with_a_drafter_have_the_same_tokens(kind, first):
    run(kind, first, 20, False, drafter=Echo)


@pytest.mark.parametrize("kind", ["hybrid", "gqa"])
def test_programs_with_prompt_lookup_have_the_same_tokens(kind):
    run(kind, 1300, 10, False, drafter=lambda _: PromptLookup(shortest=1))


def multi_token(model: Model) -> Drafter:
    return drafter_of(started(mtp_config(model.config, taps=(0, 1, 2)), model), 3, sampled=False)


def pairs(model: Model) -> Drafter:
    return drafter_of(started(eagle3_config(model.config, taps=(0, 1, 2)), model), 3, sampled=False)


@pytest.mark.parametrize(("kind", "drafter", "first"), [("hybrid with mtp", multi_token, 1320), ("gqa", pairs, 1340)])
def test_programs_with_a_real_draft_have_the_same_tokens(kind, drafter, first):
    """New weights come in between: the drafts read the target's embedding and head where they are."""
    run(kind, first, 10, False, drafter=drafter)


def sampled(model: Model) -> Echo:
    """Draws from a pruned vocabulary that is in no order."""
    return Echo(model, sampled=True, vocabulary_V=torch.randperm(VOCAB, generator=torch.manual_seed(3))[:40])


def greedy(request: Request) -> bool:
    return request.sampling.temperature == 0


@pytest.mark.parametrize("first", range(1400, 1420, 10))
def test_sampled_drafts_leave_greedy_requests_as_they_are_among_others(first):
    run("hybrid", first, 10, False, drafter=sampled, same=greedy)
