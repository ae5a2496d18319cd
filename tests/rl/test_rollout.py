"""Rollouts: honest parking, one budget, and failures at the edges that end one trajectory and no other."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny

from nonet.engine import Engine
from nonet.harness import Episode
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import scorer
from nonet.rl.setting import open_sandbox
from nonet.sandbox import LocalSandbox
from nonet.types import Message, Sampling, SandboxRecipe, Segment, Task, ToolCall, Trajectory

LOOK = '<call>{"name": "list_files", "arguments": {}}</call>'
BOX = SandboxRecipe({"a": "fig"}, ("list_files", "read_file"))
TASK = Task("t/0", (Message.user("look"),), effort="low", sandbox=BOX, rewards=())


class Stage:
    """One rollout over scripted turns: say[id] lists the texts of each turn (the last one repeats)."""

    def __init__(
        self, nano, say: dict[str, list[str]], max_tokens: int = 200, task: Task = TASK, rewards=None, box=open_sandbox
    ):
        self.nano, self.say, self.scores = nano, say, []
        self.generator = tiny.Scripted(self.turn)
        self.spec = tiny.setting(nano).spec
        self.box, self.task, self.live = box, task, []
        self.judge = scorer(lambda _: rewards or {})
        self.rollout = Rollout(self.generator, self.open, self.score, Sampling(seed=5), max_tokens)
        self.all = [Trajectory(task.id, 0, s) for s in range(len(say))]

    def turn(self, name: str, turn: int) -> list[int]:
        lines = self.say[name]
        return [*self.nano.encode(lines[min(turn, len(lines) - 1)]), self.nano.turn_end]

    def open(self, t: Trajectory) -> Episode:
        return Episode.resume(self.task, self.spec, self.nano, t, self.open_box)

    def open_box(self, task: Task, checkpoint: Any):
        self.live.append(self.box(task, checkpoint))
        return self.live[-1]

    def score(self, t: Trajectory, episode: Episode) -> None:
        self.scores.append(t.id)
        self.judge(t, episode)

    def run(self, quota: int) -> int:
        return self.rollout.run([t for t in self.all if t.status in ("new", "parked")], quota)

    def finish(self) -> list[Trajectory]:
        self.run(99)
        return self.all


def name(sample: int) -> str:
    return f"group=0/sample={sample}"


def closed(box: LocalSandbox) -> bool:
    return not Path(box._root).exists()


def authors(t: Trajectory) -> list[str]:
    return [s.author for s in t.segments]


# ----------------------------------------------------------------------- quota and parking


def test_the_quota_pauses_generation_and_parks_the_others(nano):
    stage = Stage(nano, {name(0): ["a"], name(1): ["b" * 9], name(2): ["c" * 30]})
    assert stage.run(1) == 1
    assert [t.status for t in stage.all] == ["done", "parked", "parked"]
    assert not stage.generator.busy
    assert stage.all[1].tokens != ()
    assert stage.all[1].sandbox == {"tools": list(BOX.tools), **stage.all[1].sandbox}
    assert stage.finish()[2].stop_reason == "stop"
    assert sorted(stage.scores) == [name(0), name(1), name(2)]


def test_parking_every_few_tokens_gives_the_tokens_of_an_uncut_run(nano):
    say = {name(0): [LOOK, LOOK, "done"], name(1): ["x" * 25], name(2): [LOOK + "ab", "<call>{", "ok"]}
    whole = Stage(nano, say).finish()
    for every in (1, 2, 5):
        stage = Stage(nano, say)
        stage.generator.patience = every
        for _ in range(300):
            stage.run(99)
        for a, b in zip(whole, stage.all, strict=True):
            assert (a.segments, a.stop_reason, a.status) == (b.segments, b.stop_reason, b.status)


def test_an_abort_between_a_call_and_its_result_loses_and_repeats_nothing(nano):
    """slime#1861: log-probs, mask, ids and text got out of step when the abort fell there."""
    look = len(nano.encode(LOOK)) + 1
    stage = Stage(nano, {name(0): [LOOK, "done"], name(1): ["1" * (look - 1)]})  # both turns end in the same step
    assert stage.run(1) == 1
    t = stage.all[0]
    assert (t.status, authors(t)) == ("parked", ["prompt", "policy", "tool"])
    assert t.segments[2].texts == ("a",)
    assert len(t.segments[1].tokens) == len(t.segments[1].logprobs) == look
    stage.finish()
    assert authors(t) == ["prompt", "policy", "tool", "policy"]
    assert nano.decode(t.segments[3].tokens) == "done<|end|>"
    assert stage.generator.requests[-1].tokens == tuple(x for s in t.segments[:3] for x in s.tokens)


def test_one_budget_covers_all_turns_and_pauses(nano):
    """slime#2260, verl#7207: a continuation got the whole response budget again."""
    stage = Stage(nano, {name(0): [LOOK]}, max_tokens=45)
    stage.generator.patience = 7
    for _ in range(30):
        stage.run(1)
    t = stage.all[0]
    assert (t.status, t.stop_reason, t.policy_tokens) == ("done", "length", 45)
    written = [s.author == "policy" for s in t.segments for _ in s.tokens]
    assert len(stage.generator.requests) > 5
    for r in stage.generator.requests:
        assert sum(written[: len(r.tokens)]) + r.max_tokens == 45


def test_a_resumed_request_gets_what_is_left_of_budget_and_context(nano):
    """slime#2260: 24,576 new tokens allowed, 19,202 written, a limit of 40,960: all was asked for again."""
    stage = Stage(nano, {name(0): ["x"]}, max_tokens=24_576)
    stage.generator.context = 40_960
    (t,) = stage.all
    values = (-0.1,) * 19_202
    t.segments = [Segment("prompt", (1,) * 20_000), Segment("policy", (5,) * 19_202, values, values, 0)]
    t.status = "parked"
    stage.run(1)
    (request,) = stage.generator.requests
    assert len(request.tokens) == 39_202
    assert request.max_tokens == min(24_576 - 19_202, 40_960 - 39_202) == 1_758


def test_one_rollout_a_hundred_times_longer_does_not_delay_the_pause(nano):
    """verl#4896: the pause waited for long tasks; verl#7611: it killed what was in flight."""
    stage = Stage(nano, {name(0): ["x" * 2000], **{name(i): ["y" * 20] for i in range(1, 8)}}, max_tokens=4000)
    assert stage.run(7) == 7
    assert stage.all[0].status == "parked"
    short = max(t.policy_tokens for t in stage.all[1:])
    assert stage.all[0].policy_tokens == short
    assert short * 50 < len(stage.nano.encode("x" * 2000))


def test_what_is_due_ends_before_the_pause(nano):
    stage = Stage(nano, {name(0): ["a"], name(1): ["b" * 30], name(2): ["c" * 60]})
    assert stage.rollout.run(stage.all, 1, due={name(1)}) == 2
    assert [t.status for t in stage.all] == ["done", "done", "parked"]


def test_a_budget_that_ends_with_a_finished_call_ends_the_attempt(nano):
    look = len(nano.encode(LOOK)) + 1
    (t,) = Stage(nano, {name(0): [LOOK, "done"]}, max_tokens=look).finish()
    assert (t.status, t.stop_reason) == ("done", "length")
    assert authors(t) == ["prompt", "policy", "tool"]


def test_requests_carry_the_stream_the_stops_and_hold(nano):
    stage = Stage(nano, {name(0): [LOOK, "done"], name(1): ["a"]})
    stage.finish()
    by_id: dict[str, set[str]] = {}
    for r in stage.generator.requests:
        assert (r.stop_ids, r.hold, r.sampling) == (nano.stop_ids, True, Sampling(seed=5))
        by_id.setdefault(r.id, set()).add(r.stream)
    assert all(len(streams) == 1 for streams in by_id.values())
    assert len({s for streams in by_id.values() for s in streams}) == 2


def test_segments_carry_the_version_that_wrote_them(nano):
    stage = Stage(nano, {name(0): ["x" * 40], name(1): ["a"], name(2): ["bbb"]})
    for version in (2, 4, 6):
        stage.generator.version = version
        stage.run(1)
    assert stage.all[0].versions == (2, 4, 6)


def test_the_scorer_sees_the_sandbox_before_it_is_closed(nano):
    seen = []
    stage = Stage(nano, {name(0): ["done"]}, rewards={"r": lambda task, said, box: seen.append(box.files()) or 1.0})
    (t,) = stage.finish()
    assert (seen, t.rewards, t.status) == ([{"a": "fig"}], {"r": 1.0}, "done")
    assert closed(stage.live[0])


def test_every_sandbox_that_was_opened_is_closed(nano):
    stage = Stage(nano, {name(0): [LOOK, "x" * 30], name(1): ["a"], name(2): [LOOK]}, max_tokens=60)
    stage.run(1)
    stage.finish()
    assert len(stage.live) == 5
    assert all(map(closed, stage.live))


# -------------------------------------------------------------------- failures at the edges


class Broken(LocalSandbox):
    """A sandbox whose named method raises, for the second trajectory only."""

    count = 0

    def __init__(self, recipe: SandboxRecipe, method: str):
        super().__init__(recipe)
        self.method = method

    def call(self, call: ToolCall):
        self.fail("call")
        return super().call(call)

    def checkpoint(self):
        self.fail("checkpoint")
        return super().checkpoint()

    def close(self):
        super().close()
        self.fail("close")

    def fail(self, method: str) -> None:
        if method == self.method:
            raise OSError(f"{method} broke")


def breaking(method: str):
    """open_sandbox that gives the second attempt a sandbox whose `method` breaks."""
    opened = []

    def open_box(task: Task, checkpoint: Any):
        opened.append(task)
        if len(opened) != 2:
            return open_sandbox(task, checkpoint)
        if method == "open":
            raise OSError("open broke")
        return Broken(task.sandbox, method)

    return open_box


@pytest.mark.parametrize("method", ["open", "call", "checkpoint"])
def test_a_broken_sandbox_fails_its_trajectory_and_no_other(nano, method):
    say = {name(i): [LOOK, "x" * 30 if i else "done"] for i in range(3)}
    stage = Stage(nano, say, box=breaking(method))
    stage.run(1 if method != "open" else 2)
    stage.finish()
    assert [t.status for t in stage.all] == ["done", "failed", "done"]
    assert stage.all[1].stop_reason == f"sandbox: OSError: {method} broke"
    assert sorted(stage.scores) == [name(0), name(2)]


def test_a_sandbox_that_cannot_be_closed_stops_no_other(nano):
    stage = Stage(nano, {name(i): [LOOK, "done"] for i in range(3)}, box=breaking("close"))
    first, second, third = stage.finish()
    assert (first.status, third.status) == ("done", "done")
    assert (second.status, second.stop_reason) == ("failed", "sandbox: OSError: close broke")


@pytest.mark.parametrize("value", [math.nan, math.inf, "much", None])
def test_a_reward_that_is_no_number_fails_the_attempt(nano, value):
    """NaN would spread through the group's mean into every weight."""
    stage = Stage(nano, {name(0): ["a"]}, rewards={"r": lambda *_: value})
    (t,) = stage.finish()
    assert t.status == "failed"
    assert t.stop_reason.startswith("reward r: ")


def test_a_reward_that_raises_fails_the_attempt_with_the_reason(nano):
    def reward(task, transcript, sandbox):
        if transcript[-1].text == "b":
            raise KeyError("oops")
        return 0.5

    stage = Stage(nano, {name(0): ["a"], name(1): ["b"], name(2): ["c"]}, rewards={"mine": reward})
    assert [t.status for t in stage.finish()] == ["done", "failed", "done"]
    assert stage.all[1].stop_reason == "reward mine: KeyError: 'oops'"
    assert stage.all[0].rewards == {"mine": 0.5}


def test_a_slow_reward_does_not_hold_up_generation(nano):
    """slime#2176: the loop waited for the judge; here it may take as long as another attempt keeps writing."""
    others_done = threading.Event()

    def reward(task, transcript, sandbox):
        if transcript[-1].text == "a":
            assert others_done.wait(20)
        else:
            others_done.set()
        return 1.0

    stage = Stage(nano, {name(0): ["a"], name(1): ["b" * 60]}, rewards={"r": reward})
    assert [t.rewards for t in stage.finish()] == [{"r": 1.0}] * 2


def test_a_context_that_outgrows_the_model_ends_the_attempt_not_the_run(nano):
    """slime#2260 ended in a context overflow. A tool that prints more than the model can read is the task's doing."""
    m = tiny.model(vocab=nano.vocab_size, max_position=96)
    box = SandboxRecipe({"a": "word " * 100}, ("read_file",))
    task = Task("t/1", (Message.user("read"),), effort="low", sandbox=box, rewards=())
    read = '<call>{"name": "read_file", "arguments": {"path": "a"}}</call>'
    stage = Stage(nano, {name(0): [read, "done"], name(1): ["b" * 40]}, max_tokens=30, task=task)
    scripted, engine = stage.generator, Engine(m)

    def submit(request):  # the engine's refusal, in front of scripted words
        engine.submit(request)
        engine.abort(request.id)
        tiny.Scripted.submit(scripted, request)

    scripted.submit, scripted.context = submit, engine.context
    first, second = stage.finish()
    assert (second.status, second.stop_reason) == ("done", "length")
    assert first.status == "done"
    assert authors(first)[:3] == ["prompt", "policy", "tool"]
