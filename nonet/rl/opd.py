"""On-policy distillation as a Credit: what a token is worth is what its teacher thinks of it, not how the task ended.

    r_t = clip(sg(log pi_teacher(y_t | x, y_<t) - log pi_student(y_t | e, x, y_<t)), -r_max, +r_max)
    A_t = sum_{k >= t} discount^(k - t) r_k + outcome * (reward - group mean)

over the policy's own tokens; a tool's are skipped and not counted as distance. Discount 0 (A_t = r_t) is in expectation
the gradient of each state's reverse KL with the states held still; discount 1 that of the whole sequence's, with more
variance. Nothing is whitened and no group baseline is taken from r: either would divide the teacher's signal away.
Clipping biases r as an estimate of the KL, so the share that is clipped is reported.

Rules: a trajectory cut by its budget is trained, for each of its tokens was judged; one whose sandbox or reward broke
is not; a group of equal outcomes is trained like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nonet.engine.scoring import Passage, score
from nonet.model import Model
from nonet.rl.advantage import GroupMean
from nonet.rl.batch import Part, Scored, name
from nonet.rl.config import RLConfig
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.invariants import check_group
from nonet.rl.kl import Sight, Sights
from nonet.rl.learner import Learner
from nonet.rl.loop import Loop
from nonet.rl.setting import Setting
from nonet.rl.teacher import LocalTeacher, Teacher, of_policy, passage, teacher_prompt
from nonet.run import Run
from nonet.types import Task, Trajectory, UserError


class OPD:
    """A Credit. learner: the student, whose weights "current" log-probs come from; `targets` is for its kl losses."""

    def __init__(self, config: DistillConfig, experts: Experts, setting: Setting, learner: Learner):
        self.config, self.experts, self.setting, self.learner = config, experts, setting, learner
        self.figures: dict[str, Any] = {}
        self._ratios: dict[str, list[float]] = {}
        self._sights: dict[str, Sight] = {}
        if config.loss != "reward":
            learner.teacher = self.targets

    def __call__(self, groups: Sequence[list[Trajectory]]) -> list[Scored]:
        for group in groups:
            check_group(group, self.learner.config.samples)
        played = [t for g in groups for t in g if t.status == "done" and t.policy_tokens]
        tasks = [self.setting.task("train", t.group) for t in played]
        student, teacher = self._student(played), self._taught(played, tasks)
        ratios = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(teacher, student, strict=True)]
        self._ratios = {name(t): r for t, r in zip(played, ratios, strict=True)}
        self.figures = self._measured(tasks, ratios)
        outcome, c = self._outcomes(groups), self.config
        return [
            Scored(t, tuple(a + c.outcome * outcome.get(t.id, 0.0) for a in returns(r, c.r_max, c.discount)))
            for t, r in zip(played, ratios, strict=True)
        ]

    def explain(self, trajectory: Trajectory) -> dict[str, list[float]]:
        """Of the last call: log pi_teacher - log pi_student of each policy token, not clipped."""
        ratios = self._ratios.get(name(trajectory))
        return {} if ratios is None else {"teacher_log_ratio": ratios}

    def targets(self, part: Part, names: Sequence[str]) -> Sights:
        """`Learner.teacher` for kl losses: what the teachers would say in place of each token of these rows."""
        return Sights([self._sights[n] for n in names], self.learner.config.temperature)

    # ----------------------------------------------------------------- figures

    def _outcomes(self, groups: Sequence[list[Trajectory]]) -> dict[str, float]:
        """Group-mean advantage by trajectory; none where a group is too short to have a mean."""
        if not self.config.outcome:
            return {}
        mean = replace(GroupMean.of(self.learner.config), drop_dead=False, drop_truncated=False)
        return {s.trajectory.id: s.advantages[0] for s in mean(groups)}

    def _measured(self, tasks: Sequence[Task], ratios: Sequence[Sequence[float]]) -> dict[str, Any]:
        """kl: mean of student over teacher log-ratios, an unbiased estimate for tokens that the student sampled."""
        cells: dict[str, list[float]] = {}
        for task, r in zip(tasks, ratios, strict=True):
            cells.setdefault(f"{task.domain}:{task.effort}", []).extend(r)
        everything = [x for r in ratios for x in r]
        clipped = sum(abs(x) > self.config.r_max for x in everything)
        return {
            "opd_kl": -_mean(everything),
            "opd_clipped": clipped / max(1, len(everything)),
            "opd_experts": {cell: {"kl": -_mean(r), "tokens": len(r)} for cell, r in sorted(cells.items())},
        }

    # ------------------------------------------------------------------ scores

    def _student(self, played: Sequence[Trajectory]) -> list[list[float]]:
        """As recorded at sampling; under "current", trajectories in which older weights wrote are scored again."""
        out = [[x for s in t.segments for x in s.logprobs] for t in played]
        if self.config.student == "behaviour":
            return out
        config, version = self.learner.config, self.learner.version
        stale = [i for i, t in enumerate(played) if t.versions != (version,)]
        passages = [passage(played[i]) for i in stale]
        scored = score(self.learner.model, passages, config.temperature, config.deterministic)
        for i, logprobs in zip(stale, scored, strict=True):
            out[i] = of_policy(played[i], logprobs)
        return out

    def _taught(self, played: Sequence[Trajectory], tasks: Sequence[Task]) -> list[list[float]]:
        """Log-probs that each trajectory's own teacher gives it; one teacher after another."""
        teachers = [self.experts.of(task) for task in tasks]
        told = {t.group: task for t, task in zip(played, tasks, strict=True)}
        prompts = {g: teacher_prompt(self.setting, task, self.config.teacher_effort) for g, task in told.items()}
        judge = self._by_token if self.config.loss == "reward" else self._by_vocabulary
        out: list[list[float]] = [[] for _ in played]
        self._sights = {}
        for teacher in self.experts.in_turn(teachers):
            mine = [i for i, t in enumerate(teachers) if t is teacher]
            passages = [passage(played[i], prompts[played[i].group]) for i in mine]
            for i, logprobs in zip(mine, judge(teacher, [played[i] for i in mine], passages), strict=True):
                out[i] = logprobs
        return out

    def _by_token(
        self, teacher: Teacher, played: Sequence[Trajectory], passages: Sequence[Passage]
    ) -> list[list[float]]:
        found = teacher.logprobs(passages, self.learner.config.temperature)
        return [of_policy(t, logprobs) for t, logprobs in zip(played, found, strict=True)]

    def _by_vocabulary(
        self, teacher: Teacher, played: Sequence[Trajectory], passages: Sequence[Passage]
    ) -> list[list[float]]:
        """The same, and what the teacher's head reads is kept for the loss."""
        if not isinstance(teacher, LocalTeacher):
            raise UserError(
                f"distill.loss = {self.config.loss}: needs the teacher's whole distribution, and {teacher.where} tells "
                "log-probs of given tokens only; name its directory, or set distill.loss = reward"
            )
        features, head_WD = teacher.features(passages)
        size = self.learner.model.config.vocab_size
        if len(head_WD) != size:  # tokenizers may be equal all the same: heads are padded to round numbers
            raise UserError(
                f"distill.loss = {self.config.loss}: {teacher.where} has a head of {len(head_WD)} rows and the student "
                f"one of {size}; set distill.loss = reward"
            )
        out = []
        for t, p, features_ND in zip(played, passages, features, strict=True):
            said = of_policy(t, p.tokens[p.first :])
            sight = Sight(features_ND[of_policy(t, range(len(features_ND)))], head_WD)
            out.append(sight.logprobs(said, self.learner.config.temperature))
            self._sights[name(t)] = sight
        return out


def distilling(
    model: Model, setting: Setting, config: DistillConfig, experts: Experts, rl: RLConfig, run: Run, seed: int = 0
) -> Loop:
    """The RL loop with this credit. That the experts read what the student writes is for `Experts.require` to say."""
    loop = Loop(model, setting, rl, run, seed, objective=config.objective)
    loop.credit = OPD(config, experts, setting, loop.learner)
    return loop


def returns(ratios: Sequence[float], r_max: float, discount: float) -> list[float]:
    """Each token's clipped ratio and, discounted, those after it."""
    ahead, out = 0.0, list[float]()
    for ratio in reversed(ratios):
        ahead = max(-r_max, min(r_max, ratio)) + discount * ahead
        out.append(ahead)
    return out[::-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
