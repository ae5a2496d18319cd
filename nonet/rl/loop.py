"""Synchronous RL with partial rollouts (K3 section 4.2): the first walk of the architecture document, top to bottom.

One iteration is a pure function of what a checkpoint holds (weights, optimiser, step, an offset in the park store that
the pool is rebuilt from): killed anywhere, it is replayed from the last checkpoint with the same outcome, so every
sampled prompt is trained exactly once in the surviving history (law 17).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nonet.engine import Engine
from nonet.model import Model
from nonet.progress import progress
from nonet.rl.advantage import Credit, GroupMean, is_dead, rewarded
from nonet.rl.batch import Scored
from nonet.rl.config import RLConfig
from nonet.rl.learner import Learner
from nonet.rl.monitor import EngineCost, counts, staleness
from nonet.rl.objective import Objective
from nonet.rl.packing import pack
from nonet.rl.park import ParkStore
from nonet.rl.pool import Pool, Rules
from nonet.rl.record import trajectory_record
from nonet.rl.rollout import Rollout
from nonet.rl.scoring import Score, scorer
from nonet.rl.setting import Setting
from nonet.run import Run
from nonet.types import Sampling, Trajectory, UserError

STEP_EVENTS = ("rl_step", "trained", "dropped")  # undone with the steps after a checkpoint


class Loop:
    """score: judges what has ended (None: the rewards of the setting). on_step: called with the number of steps done
    before each iteration, so that what it sets is again a function of what a checkpoint holds. credit, objective: what
    is trained, and how; None: the group mean and the objective that config names. engine: over this very model.
    """

    def __init__(
        self,
        model: Model,
        setting: Setting,
        config: RLConfig,
        run: Run,
        seed: int = 0,
        *,
        score: Score | None = None,
        on_step: Callable[[int], None] | None = None,
        credit: Credit | None = None,
        objective: Objective | None = None,
        engine: Engine | None = None,
    ):
        self.setting, self.config, self.run, self.seed, self.on_step = setting, config, run, seed, on_step
        self.engine = engine or Engine(model, config.max_batch, config.deterministic)
        self.learner = Learner(model, config, objective)
        self.credit = credit or GroupMean.of(config)
        self.pool = Pool(config.groups, config.samples, rules(config))
        self.park = ParkStore(run.path / "park", seed)
        self.rollout = Rollout(
            self.engine,
            setting.opener("train"),
            score or scorer(setting.rewards_of),
            Sampling(temperature=config.temperature, seed=seed),
            config.max_tokens,
            config.score_timeout_s,
            config.judges,
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
        if self.on_step is not None:
            self.on_step(self.step)
        began, cpu_began = time.time(), time.process_time()
        cost, version = EngineCost(self.engine), self.learner.version
        given_up, active, ended = self._roll(version)
        groups = self._release(version)
        rolled = time.time()
        scored = self.credit(groups)
        learned = self.learner.step(pack(scored, self.config.max_tokens))
        engine_did = cost.figures()
        self.engine.load(self.learner.version, on_resume=self.config.on_resume)
        self.step += 1
        trained = [s.trajectory for s in scored]
        closed = given_up + [t for t in active if t.status in ("done", "failed")]
        metrics = {
            **summary(groups, self.setting), **self.credit.figures,
            **learned, **staleness(trained, version), **engine_did,
            "groups": len(groups), "active": len(active), "finished": ended, "parked": self.pool.parked,
            "given_up": len(given_up), "sampled": counts(closed, self.setting),
            "trained": counts(trained, self.setting), "rollout_s": rolled - began, "update_s": time.time() - rolled,
            "cpu_s": time.process_time() - cpu_began,
        }  # fmt: skip
        self.run.event("rl_step", step=self.step, version=self.learner.version, **metrics)
        self.run.event("trained", step=self.step, groups=[g[0].group for g in groups])
        self._keep(groups, scored)
        return metrics

    def _roll(self, version: int) -> tuple[list[Trajectory], list[Trajectory], int]:
        """Play until the quota has ended; all that is unfinished is on disk afterwards. Returns the attempts given up
        for their age, what was active, and how many of these have ended.
        """
        given_up, dropped = self.pool.refresh(version)
        self.park.release(dropped, f"dropped at step {self.step + 1}: older than rl.max_age")
        active = self.pool.take(lambda group: self.setting.task("train", group).id)
        quota = math.ceil(self.config.fraction * len(active))
        ended = self.rollout.run(active, quota, self.pool.due(version))
        for t in active:
            if t.status != "parked":
                self.engine.abort(t.id)  # nobody will go on from its memory
        self.park.write(active)
        if dropped:
            self.run.event("dropped", step=self.step + 1, groups=dropped)
        return given_up, active, ended

    def _release(self, version: int) -> list[list[Trajectory]]:
        groups = self.pool.release(version)
        self.park.release([g[0].group for g in groups], f"trained at step {self.step + 1}")
        return groups

    def _keep(self, groups: Sequence[list[Trajectory]], scored: Sequence[Scored]) -> None:
        """Write some groups out for reading: evenly spaced, because the first are always the longest relayed."""
        worth = {s.trajectory.id: {"advantage": s.advantages} for s in scored}
        count = min(self.config.keep_groups, len(groups))
        kept = [t for i in range(count) for t in groups[i * len(groups) // count]]
        tokenizer, records = self.setting.tokenizer, []
        for t in kept:
            columns = {**worth.get(t.id, {}), **self.credit.explain(t)}
            records.append(trajectory_record(t, self.setting.task("train", t.group), tokenizer, self.step, columns))
        if records:
            self.run.write_trajectories(f"step-{self.step:06d}", records)

    # ----------------------------------------------------------- checkpoints

    def _save(self) -> None:
        mark = self.park.mark(self.pool.next_group, self.pool.held)

        def write(folder: Path) -> None:
            torch.save(self.learner.state_dict(), folder / "state.pt")
            (folder / "park.json").write_text(json.dumps(mark))

        self.run.save(f"rl-{self.step}", write)
        self.run.prune("rl", keep=1)
        self.park.settle()

    def _restore(self) -> None:
        found = self.run.checkpoints("rl")
        if found:
            self._continue(found[-1])
        else:
            self.park.start()
        self.run.rewind(lambda e: e["kind"] not in STEP_EVENTS or e["step"] <= self.step)

    def _continue(self, checkpoint: Path) -> None:
        if not (checkpoint / "park.json").exists():
            raise UserError(f"{checkpoint}: no park.json; an older Nonet wrote it: finish it there, or start a new run")
        self.learner.load_state_dict(torch.load(checkpoint / "state.pt", weights_only=True))
        parked = self.park.resume(json.loads((checkpoint / "park.json").read_text()))
        if parked.undone:
            print(f"park store: {parked.undone} bytes after the last checkpoint are played again", file=sys.stderr)
        self.pool.restore(parked.next_group, parked.held)
        self.step = self.learner.version = int(checkpoint.name.rsplit("-", 1)[1])
        self.engine.load(self.learner.version)


def rules(config: RLConfig) -> Rules:
    return Rules(config.max_age, config.stale, config.retries if config.failed_member == "retry" else 0)


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
        "dead_groups": sum(is_dead(rewarded(g)) for g in groups),
        "failed": sum(t.status == "failed" for g in groups for t in g),
        "tokens": len(written),
        "length": _mean([t.policy_tokens for t in done]),
        "truncated": _mean([float(t.stop_reason == "length") for t in done]),
        "entropy": -_mean(written),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
