"""Law 10: trained tokens are the tokens generated, ids and behaviour log-probs alike, never re-tokenised."""

from __future__ import annotations

import pytest
import tiny
import torch

from nonet.engine import Engine
from nonet.rl import Loop, RLConfig
from nonet.rl.batch import PackedBatch, Scored
from nonet.rl.packing import pack
from nonet.rl.rollout import Rollout
from nonet.run import Run
from nonet.types import Completion, Request, Sampling, Trajectory


class Recorder:
    """A Generator that writes down every request and completion that passes."""

    def __init__(self, inner):
        self.inner = inner
        self.open: dict[str, Request] = {}
        self.heard: dict[str, list[tuple[Request, Completion]]] = {}

    @property
    def context(self) -> int:
        return self.inner.context

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def busy(self) -> bool:
        return self.inner.busy

    def submit(self, request: Request) -> None:
        self.open[request.id] = request
        self.inner.submit(request)

    def step(self) -> list[Completion]:
        return self._note(self.inner.step())

    def pause(self) -> list[Completion]:
        return self._note(self.inner.pause())

    def _note(self, completions: list[Completion]) -> list[Completion]:
        for c in completions:
            self.heard.setdefault(c.id, []).append((self.open.pop(c.id), c))
        return completions


def assert_row_is_what_was_heard(batch: PackedBatch, row: int, heard: list[tuple[Request, Completion]]) -> None:
    """tokens, mask, behaviour log-probs and versions of one row, token by token, in order.

    An attempt whose budget ends with a tool call closes with the tool's answer, which nobody was asked to continue.
    """
    last_request, last = heard[-1]
    tokens = [*last_request.tokens, *last.tokens]
    mask, behaviour, version = [False] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens)
    for request, c in heard:
        assert request.tokens + c.tokens == tuple(tokens[: len(request.tokens) + len(c.tokens)])  # append-only
        for i, logprob in enumerate(c.logprobs, len(request.tokens)):
            mask[i], behaviour[i], version[i] = True, logprob, c.policy_version
    cut = slice(batch.starts[row], batch.starts[row + 1])
    unheard = batch.starts[row + 1] - batch.starts[row] - len(tokens)
    assert unheard >= 0
    tokens += batch.tokens_T[cut][len(tokens) :].tolist()
    mask, behaviour, version = mask + [False] * unheard, behaviour + [0.0] * unheard, version + [-1] * unheard
    assert batch.tokens_T[cut].tolist() == tokens
    assert batch.mask_T[cut].tolist() == mask
    assert torch.equal(batch.behaviour_T[cut], torch.tensor(behaviour))
    assert batch.version_T[cut].tolist() == version


def test_the_loop_trains_what_the_engine_wrote_across_pauses_and_versions(policy, nano, tmp_path, monkeypatch):
    config = RLConfig(steps=5, groups=4, samples=3, fraction=0.5, max_tokens=40, temperature=1.2, lr=1e-3, warmup=0)
    loop = Loop(policy, tiny.setting(nano, rewards={"varied": tiny.varied}), config, Run(tmp_path))
    recorder = Recorder(loop.engine)
    loop.rollout.generator = recorder
    batches: list[PackedBatch] = []
    step = loop.learner.step
    monkeypatch.setattr(loop.learner, "step", lambda batch: batches.append(batch) or step(batch))
    loop.fit()
    versions, retokenised = set(), 0
    for batch in batches:
        for row, name in enumerate(batch.names):
            heard = recorder.heard[name.split()[1]]
            assert_row_is_what_was_heard(batch, row, heard)
            versions.add(len({c.policy_version for _, c in heard}))
            retokenised += any(nano.encode(nano.decode(c.tokens)) != list(c.tokens) for _, c in heard)
    assert {1, 2} <= versions  # some trajectories were written by several policies
    assert retokenised  # and some would have come back as other ids through text


# ---------------------------------------- trl#5224: decode + re-encode in a tool loop


@pytest.fixture
def split_hello(nano) -> list[int]:
    """[he][llo]: two tokens whose text is one token."""
    ids = [*nano.encode("he"), *nano.encode("llo")]
    assert len(ids) == 2
    assert nano.encode(nano.decode(ids)) == nano.encode("hello")
    assert len(nano.encode("hello")) == 1
    return ids


def test_he_llo_survives_two_tool_turns(nano, split_hello):
    """trl#5224, SkyRL#123, NeMo-Gym#1416: the sampled ids are trained, not those their text encodes to."""
    end = nano.turn_end

    def turns(name: str, turn: int) -> list[int]:
        if turn == 2:
            return [*split_hello, *split_hello, end]
        before, after = '<call>{"name": "write_file", "arguments": {"path": "', '", "content": ""}}</call>'
        return [*split_hello, *nano.encode(before), *split_hello, *nano.encode(after), end]

    setting = tiny.setting(nano)
    generator = Recorder(tiny.Scripted(turns, version=5))
    ended: list[str] = []
    rollout = Rollout(generator, setting.opener("train"), lambda t, e: ended.append(t.id), Sampling(), 400)
    task = setting.task("train", 0)
    assert task.sandbox is not None
    t = Trajectory(task.id, 0, 0)
    rollout.run([t], 1)
    assert ended == [t.id]
    assert [s.author for s in t.segments] == ["prompt", "policy", "tool", "policy", "tool", "policy"]
    batch = pack([Scored.uniform(t, 1.0)])
    assert_row_is_what_was_heard(batch, 0, generator.heard[t.id])
    trained = batch.tokens_T[batch.mask_T].tolist()
    assert trained == [*turns("", 0), *turns("", 1), *turns("", 2)]
    assert nano.encode(nano.decode(trained)) != trained
    assert batch.version_T[batch.mask_T].unique().tolist() == [5]


def test_tool_and_prompt_tokens_are_in_the_context_but_never_trained(nano, policy):
    setting = tiny.setting(nano)
    rollout = Rollout(Engine(policy), setting.opener("train"), lambda t, e: None, Sampling(), 60)
    t = Trajectory(setting.task("train", 0).id, 0, 0)
    rollout.run([t], 1)
    assert any(s.author == "tool" for s in t.segments)
    batch = pack([Scored.uniform(t, 2.0)])
    masked = iter(batch.mask_T.tolist())
    for s in t.segments:
        assert [next(masked) for _ in s.tokens] == [s.author == "policy"] * len(s.tokens)
    assert batch.advantage_T[~batch.mask_T].abs().sum() == 0
    assert batch.advantage_T[batch.mask_T].unique().tolist() == [2.0]
