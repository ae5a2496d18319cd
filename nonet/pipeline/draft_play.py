"""A policy at play, as its draft needs it: the answers a draft learns from, and how many of its guesses stand.

Answers are whole episodes on training tasks, tools and all, sampled at temperature 1; which tokens count is known from
who wrote them. A draft is measured by real verification on held-out tasks: the engine speculates with it while the
policy plays, and every verifying step of every turn is counted for its task.

    FOLDER/DOMAIN-00000.jsonl    the answers (draft/answers.Answer) of `batch` tasks, from that one on; whole or absent
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nonet.draft.answers import Answer, Row, loops
from nonet.draft.model import Draft
from nonet.draft.native import drafter_of
from nonet.engine import Engine
from nonet.engine.row import Drafts
from nonet.harness import Episode
from nonet.model import Model
from nonet.pipeline.draft_eval import Asked, Told
from nonet.progress import progress
from nonet.rl.rollout import Rollout
from nonet.rl.setting import Setting, Split
from nonet.run import write_atomic
from nonet.types import Completion, Sampling, Trajectory, UserError

ANSWERS_FROM = 20_000_000  # train indices that neither demonstrations nor RL reach


class CountingEngine(Engine):
    """Keeps what was drafted, by request id: an episode asks under one id as often as it has turns."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.drafts: dict[str, Drafts] = defaultdict(Drafts)

    def step(self) -> list[Completion]:
        done = super().step()
        for completion in done:
            report = self.report(completion.id)
            if report is not None and report.drafts is not None:
                self.drafts[completion.id].add(report.drafts)
        return done


@dataclass(frozen=True)
class Policy:
    """settings: what it plays, by domain. max_tokens: it may write in one episode. batch: episodes at a time."""

    model: Model
    settings: Mapping[str, Setting]
    max_tokens: int
    batch: int

    def answers(self, folder: Path, learnt: int, chosen_by: int, first: int = ANSWERS_FROM) -> list[Answer]:
        """Of each domain's training tasks from index `first` on: `learnt` to train on, then `chosen_by` that are marked
        as held out from training. Files that are there are read instead.
        """
        folder.mkdir(parents=True, exist_ok=True)
        total, found = learnt + chosen_by, []
        with progress("draft: answers", total * len(self.settings)) as bar:
            for domain in self.settings:
                for begin in range(0, total, self.batch):
                    file = folder / f"{domain}-{begin:05d}.jsonl"
                    if not file.exists():
                        indices = range(first + begin, first + min(total, begin + self.batch))
                        played = self._played(self._engine(None), domain, "train", indices, 1.0)
                        made = [answer_of(t, domain, t.group - first >= learnt) for t in played]
                        write_atomic(file, "".join(json.dumps(asdict(a)) + "\n" for a in made))
                    found += [Answer.of(json.loads(line)) for line in file.read_text().splitlines()]
                    bar(len(found), "")
        return found

    def told(self, draft: Draft, temperature: float, tasks: int, tokens: int) -> list[Told]:
        """Play the first `tasks` held-out ones of each domain, `tokens` drafted at a time (drawn from the draft's own
        distribution where the policy samples).
        """
        out: list[Told] = []
        for domain in self.settings:
            engine = self._engine(draft, tokens)
            for t in self._played(engine, domain, "heldout", range(tasks), temperature):
                asked = Asked(t.task_id, domain, t.segments[0].tokens)
                out.append(Told(asked, engine.drafts[t.id], looping(t)))
        return out

    def _engine(self, draft: Draft | None, tokens: int = 0) -> CountingEngine:
        drafter = None if draft is None else drafter_of(draft, tokens)
        return CountingEngine(self.model, self.batch, drafter=drafter)

    def _played(
        self, engine: Engine, domain: str, split: Split, indices: Sequence[int], temperature: float
    ) -> list[Trajectory]:
        """One attempt at each task, unscored, in the order of the indices. What failed at its sandbox is left out;
        UserError if everything did.
        """
        setting = self.settings[domain]
        trajectories = [Trajectory(setting.task(split, i).id, i, 0) for i in indices]
        sampling = Sampling(temperature=temperature, seed=setting.seed)
        rollout = Rollout(engine, setting.opener(split), unscored, sampling, self.max_tokens)
        for begin in range(0, len(trajectories), self.batch):
            part = trajectories[begin : begin + self.batch]
            rollout.run(part, len(part))
        played = [t for t in trajectories if t.status == "done"]
        if not played:
            raise UserError(f"all {len(trajectories)} attempts failed; the first: {trajectories[0].stop_reason}")
        return played


def unscored(trajectory: Trajectory, episode: Episode) -> None:
    """In place of rl.scoring: what an answer is worth does not matter to a draft."""


def answer_of(t: Trajectory, domain: str, heldout: bool) -> Answer:
    """An ended episode as one row, of which the policy wrote its segments."""
    ends = torch.tensor([len(s.tokens) for s in t.segments]).cumsum(0).tolist()
    policy = [(e - len(s.tokens), e) for s, e in zip(t.segments, ends, strict=True) if s.author == "policy"]
    stop = "loop" if looping(t) else "length" if t.stop_reason == "length" else "done"
    return Answer(t.task_id, domain, heldout, (Row(t.tokens, tuple(policy)),), len(policy), len(policy), stop)


def looping(t: Trajectory) -> bool:
    return any(loops(s.tokens) for s in t.segments if s.author == "policy")
