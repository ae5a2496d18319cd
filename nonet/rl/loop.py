"""Synchronous RL with partial rollouts (K3 section 4.2): the first walk of the architecture document, top to bottom.

One iteration is a pure function of what a checkpoint holds (weights, optimiser, pool, step): killed anywhere, it is
replayed from the last checkpoint with the same outcome, so every sampled prompt is trained exactly once in the
surviving history (law 17).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nonet.engine import Engine
from nonet.model import Model
from nonet.progress import progress
from nonet.rl.advantage import Scored, advantages, is_dead
from nonet.rl.batch import pack
from nonet.rl.config import RLConfig
from nonet.rl.learner import InvariantError, Learner
from nonet.rl.pool import Pool
from nonet.rl.record import trajectory_record
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import scorer
from nonet.rl.setting import Setting
from nonet.run import Run
from nonet.types import Sampling, Trajectory


class Loop:
    def __init__(self, model: Model, setting: Setting, config: RLConfig, run: Run, seed: int = 0):
        self.setting, self.config, self.run, self.seed = setting, config, run, seed
        self.engine = Engine(model, config.max_batch, config.deterministic)
        self.learner = Learner(model, config)
        self.pool = Pool(config.groups, config.samples)
        sampling = Sampling(temperature=config.temperature, seed=seed)
        self.rollout = Rollout(
            self.engine, setting.opener("train"), scorer(setting.rewards_of), sampling, config.max_tokens
        )
        self.step = 0

    def fit(self) -> None:
        """Iterate to the configured step, continuing from the run's last checkpoint."""
        self._restore()
        saved = time.time()
        with progress("rl: iterations", self.config.steps, self.step) as bar:
            while self.step < self.config.steps:
                metrics = self.iterate()
                bar(self.step, f"reward {metrics['reward']:.3f}" if metrics["groups"] else "no complete group yet")
                if self.step == self.config.steps or time.time() - saved >= self.config.save_every_s:
                    self._save()
                    saved = time.time()

    def iterate(self) -> dict[str, Any]:
        """Rollout until a fraction has ended, train on what is complete, move the engine to the new weights."""
        began = time.time()
        active = self.pool.take(lambda group: self.setting.task("train", group).id)
        ended = self.rollout.run(active, math.ceil(self.config.fraction * len(active)))
        groups = self.pool.release()
        rolled = time.time()
        batch = pack(self._trainable(groups))
        learned = self.learner.step(batch)
        self.engine.load(self.learner.version)
        self.step += 1
        metrics = {
            **summary(groups, self.setting), **learned, "groups": len(groups), "active": len(active), "finished": ended,
            "parked": self.pool.parked, "rollout_s": rolled - began, "update_s": time.time() - rolled,
        }  # fmt: skip
        self.run.event("rl_step", step=self.step, version=self.learner.version, **metrics)
        self.run.event("trained", step=self.step, groups=[g[0].group for g in groups])
        self._keep(groups)
        return metrics

    def _trainable(self, groups: Sequence[list[Trajectory]]) -> list[Scored]:
        out: list[Scored] = []
        for group in groups:
            if len(group) != self.config.samples:
                raise InvariantError(f"group {group[0].group}: {len(group)} members, not {self.config.samples}")
            scored = advantages(group)
            if scored and not (self.config.drop_dead_groups and is_dead(scored)):
                out += scored
        return out

    def _keep(self, groups: Sequence[list[Trajectory]]) -> None:
        """Write some groups out for reading: evenly spaced, because the first are always the longest relayed."""
        count = min(self.config.keep_groups, len(groups))
        kept = [t for i in range(count) for t in groups[i * len(groups) // count]]
        setting = self.setting
        records = [trajectory_record(t, setting.task("train", t.group), setting.tokenizer, self.step) for t in kept]
        if records:
            self.run.write_trajectories(f"step-{self.step:06d}", records)

    # ----------------------------------------------------------- checkpoints

    def _save(self) -> None:
        def write(folder: Path) -> None:
            blob = {"model": self.learner.model.state_dict(), "optimizer": self.learner.optimizer.state_dict()}
            torch.save(blob, folder / "state.pt")
            (folder / "pool.json").write_text(json.dumps(self.pool.to_json()))

        self.run.save(f"rl-{self.step}", write)
        self.run.prune("rl", keep=1)

    def _restore(self) -> None:
        found = self.run.checkpoints("rl")
        if found:
            blob = torch.load(found[-1] / "state.pt", weights_only=True)
            self.learner.model.load_state_dict(blob["model"])
            self.learner.optimizer.load_state_dict(blob["optimizer"])
            self.pool.restore(json.loads((found[-1] / "pool.json").read_text()))
            self.step = self.learner.version = int(found[-1].name.rsplit("-", 1)[1])
            self.engine.load(self.learner.version)
        self.run.rewind(lambda e: e["kind"] not in ("rl_step", "trained") or e["step"] <= self.step)


def summary(groups: Sequence[list[Trajectory]], setting: Setting) -> dict[str, Any]:
    """Means over the trajectories of complete groups: reward (and per domain), length, sampled entropy, failures."""
    done = [t for g in groups for t in g if t.status == "done"]
    by_domain: dict[str, list[float]] = {}
    for t in done:
        by_domain.setdefault(setting.task("train", t.group).domain, []).append(t.reward)
    written = [lp for t in done for s in t.segments for lp in s.logprobs]
    return {
        "reward": _mean([t.reward for t in done]),
        **{f"reward_{d}": _mean(v) for d, v in sorted(by_domain.items())},
        "dead_groups": sum(is_dead(advantages(g)) for g in groups),
        "failed": sum(t.status == "failed" for g in groups for t in g),
        "tokens": len(written),
        "length": _mean([t.policy_tokens for t in done]),
        "truncated": _mean([float(t.stop_reason == "length") for t in done]),
        "entropy": -_mean(written),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
