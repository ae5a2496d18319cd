"""A served model played like an engine: the same tasks, token for token."""

from dataclasses import fields, replace

import pytest
import running
import tiny

from nonet.chat import Tokenizer
from nonet.engine import Engine
from nonet.model import hf
from nonet.ops.rng import stream_key
from nonet.rl.endpoint import Endpoint
from nonet.rl.remote import Remote
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import scorer
from nonet.types import Request, Sampling, Trajectory, UserError


@pytest.fixture(scope="module")
def url(policy_directory):
    with running.process(["-m", "nonet.cli", "serve", policy_directory, "--port", "0"]) as (_, address):
        running.wait_until_ready(address)
        yield f"{address}/v1"


def played(generator, setting, temperature: float) -> list[Trajectory]:
    active = [Trajectory(setting.task("heldout", i).id, i, 0) for i in range(6)]
    sampling = Sampling(temperature=temperature, seed=3)
    Rollout(generator, setting.opener("heldout"), scorer(setting.rewards_of), sampling, 36).run(active, len(active))
    return active


def test_tasks_over_http_are_the_tasks_of_the_engine(policy_directory, url):
    setting, model = tiny.setting(Tokenizer(policy_directory)), hf.load(policy_directory)
    remote = Remote(url, 256)
    here, there = played(Engine(model, 8), setting, 0.0), played(remote, setting, 0.0)
    assert [t.tokens for t in there] == [t.tokens for t in here]
    assert [t.rewards for t in there] == [t.rewards for t in here]
    for a, b in zip(here, there, strict=True):
        for s, z in zip(a.segments, b.segments, strict=True):
            assert z.raw_logprobs == pytest.approx(s.raw_logprobs, abs=1e-4)
    assert remote.drafted == remote.accepted == 0 and not remote.busy


def test_sampled_answers_carry_the_log_probs_they_were_drawn_with(policy_directory, url):
    setting = tiny.setting(Tokenizer(policy_directory))
    twice = [played(Remote(url, 256), setting, 0.7) for _ in range(2)]
    assert [t.tokens for t in twice[0]] == [t.tokens for t in twice[1]]
    segments = [s for t in twice[0] for s in t.segments if s.author == "policy"]
    assert any(s.logprobs != s.raw_logprobs for s in segments) and all(p <= 0 for s in segments for p in s.logprobs)


def test_what_a_server_cannot_do_is_said(url):
    remote = Remote(url, 256)
    with pytest.raises(UserError, match=r"more than 256 positions"):
        remote.submit(Request("a", (1,) * 250, 10))
    remote.submit(Request("b", (1 << 20,), 4))
    with pytest.raises(UserError, match=r"400: .*outside the vocabulary"):
        remote.step()
    gone = Remote(url, 256, endpoint=Endpoint("http://127.0.0.1:9/v1", patience_s=0.001))
    gone.submit(Request("c", (1,), 4))
    with pytest.raises(UserError, match=r"is the server up\?"):
        gone.step()


def tiny_request(folder: str, sampling: Sampling) -> Request:
    return Request("a", (3, 4, 5, 6), 24, Tokenizer(folder).stop_ids, sampling=sampling)


def test_every_transformation_of_the_sampling_reaches_the_server(policy_directory, url):
    """Not one of them may be dropped: log-probs of another distribution look just as plausible."""
    sampling = Sampling(0.9, 12, 0.95, 5, 0.01, 0.4, 0.3, 1.1, ((7, -50.0), (9, 1.5)))
    assert all(getattr(sampling, f.name) != f.default for f in fields(Sampling))
    request, engine = tiny_request(policy_directory, sampling), Engine(hf.load(policy_directory), 1)
    remote = Remote(url, 256)
    remote.submit(request)
    (there,) = remote.step()
    seed = stream_key(sampling.seed, request.stream)[0]
    engine.submit(replace(request, sampling=replace(sampling, seed=seed), stream="0"))  # of the first choice
    while not (here := engine.step()):
        continue
    assert there.tokens == here[0].tokens
    assert there.logprobs == pytest.approx(here[0].logprobs, abs=1e-4)
