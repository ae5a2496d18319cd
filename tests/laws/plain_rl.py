"""Plain synchronous RL, written without the loop, the pool, the rollout or the advantage code it is compared with.

Every attempt is played to its end, alone, each turn from a cold prefill; then one update; then the next prompts.
"""

from __future__ import annotations

from nonet.engine import Engine
from nonet.harness import Episode
from nonet.model import Model
from nonet.rl.batch import Scored
from nonet.rl.config import RLConfig
from nonet.rl.learner import Learner
from nonet.rl.packing import pack
from nonet.rl.setting import Setting, open_sandbox
from nonet.types import Request, Sampling, Segment, Trajectory


def plain_rl(model: Model, setting: Setting, config: RLConfig, seed: int) -> list[list[int]]:
    """Train `model` in place. Returns the groups drawn in each step."""
    learner = Learner(model, config)
    drawn = []
    for step in range(config.steps):
        groups = list(range(step * config.groups, (step + 1) * config.groups))
        scored = []
        for group in groups:
            members = [attempt(model, setting, config, seed, learner.version, group, k) for k in range(config.samples)]
            rewards = [t.reward for t in members]
            if len(set(rewards)) > 1:
                mean = sum(rewards) / len(rewards)
                scored += [Scored.uniform(t, r - mean) for t, r in zip(members, rewards, strict=True)]
        learner.step(pack(scored))
        drawn.append(groups)
    return drawn


def attempt(
    model: Model, setting: Setting, config: RLConfig, seed: int, version: int, group: int, sample: int
) -> Trajectory:
    task = setting.task("train", group)
    sandbox = open_sandbox(task, None)
    episode = Episode(task, setting.spec, setting.tokenizer, sandbox)
    t = Trajectory(task.id, group, sample, [Segment("prompt", tuple(episode.prompt()))])
    while not episode.stop_reason:
        left = config.max_tokens - t.policy_tokens
        if left == 0:
            break
        engine = Engine(model, deterministic=True, version=version)
        stops = setting.tokenizer.stop_ids
        sampling = Sampling(config.temperature, seed=seed)
        engine.submit(Request("one", t.tokens, left, stops, sampling, f"{task.id}#{group}/{sample}"))
        (c,) = engine.run()
        t.segments.append(Segment("policy", c.tokens, c.logprobs, c.raw_logprobs, c.policy_version))
        if c.finish_reason == "length":
            episode.close_unfinished(c.tokens, "length")
        elif (heard := episode.observe(c.tokens)) is not None:
            t.segments.append(heard)
    for name, reward in setting.rewards_of(task).items():
        t.rewards[name] = float(reward(task, episode.transcript, sandbox))
    if sandbox is not None:
        sandbox.close()
    return t
