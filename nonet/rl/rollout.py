"""Play trajectories against a Generator until enough have ended; park the rest.

Invariant: what the policy wrote is appended as it came, ids and log-probs together; nothing is decoded and encoded
again. A failure at a sandbox edge ends that trajectory with a stop reason that says so, and no other. Rewards are
computed in threads while generation goes on; they decide nothing before `run` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nonet.harness import Episode
from nonet.protocols import Generator
from nonet.rl.scoring import Judges, Score, close, fail
from nonet.types import Completion, Request, Sampling, Segment, Trajectory, UserError

OpenEpisode = Callable[[Trajectory], Episode]
SCORE_TIMEOUT_S = 120.0
JUDGES = 2  # rewards computed at the same time


class Rollout:
    """open_episode opens the attempt a trajectory records, new or parked; score judges it once it has ended."""

    def __init__(
        self,
        generator: Generator,
        open_episode: OpenEpisode,
        score: Score,
        sampling: Sampling,
        max_tokens: int,
        score_timeout_s: float = SCORE_TIMEOUT_S,
        judges: int = JUDGES,
    ):
        self.generator, self.open_episode = generator, open_episode
        self.sampling, self.max_tokens = sampling, max_tokens
        self._judges = Judges(score, score_timeout_s, judges)
        self._live: dict[str, tuple[Trajectory, Episode]] = {}

    def run(self, active: Sequence[Trajectory], quota: int, due: Collection[str] = ()) -> int:
        """Run until `quota` of `active` (or all) and each whose id is `due` have ended; park the others. Returns how
        many ended.
        """
        ended = sum(self._open(t) for t in active)
        while self.generator.busy and (ended < quota or any(name in self._live for name in due)):
            for completion in self.generator.step():
                ended += self._advance(completion)
        for completion in self.generator.pause():
            self._park(completion)
        self._judges.settle()
        return ended

    # each of these returns True when the trajectory has ended

    def _open(self, trajectory: Trajectory) -> bool:
        try:
            episode = self.open_episode(trajectory)
        except UserError:
            raise
        except Exception as e:  # the sandbox edge: any failure there is data about this trajectory
            fail(trajectory, "sandbox", e)
            return True
        self._live[trajectory.id] = trajectory, episode
        if not trajectory.segments:
            trajectory.append(Segment("prompt", tuple(episode.prompt())))
        return self._ask(trajectory, episode)

    def _ask(self, trajectory: Trajectory, episode: Episode) -> bool:
        room = self.generator.context - len(trajectory.tokens)
        if room < 1 and not trajectory.policy_tokens:
            raise UserError(f"task {trajectory.task_id}: the prompt fills all {self.generator.context} positions")
        left = min(self.max_tokens - trajectory.policy_tokens, room)
        if left <= 0:
            episode.stop_reason = "length"
            return self._end(trajectory, episode)
        stops = episode.tokenizer.stop_ids
        request = Request(trajectory.id, trajectory.tokens, left, stops, self.sampling, trajectory.stream, hold=True)
        self.generator.submit(request)
        return False

    def _advance(self, completion: Completion) -> bool:
        trajectory, episode = self._live[completion.id]
        trajectory.append(_policy_segment(completion))
        turn = trajectory.last_turn()
        if completion.finish_reason == "length":
            episode.close_unfinished(turn, "length")
            return self._end(trajectory, episode)
        try:
            result = episode.observe(turn)
        except Exception as e:  # the sandbox edge, as above
            del self._live[trajectory.id]
            close(trajectory, episode)
            fail(trajectory, "sandbox", e)
            return True
        if result is None:
            return self._end(trajectory, episode)
        trajectory.append(result)
        return self._ask(trajectory, episode)

    def _end(self, trajectory: Trajectory, episode: Episode) -> bool:
        trajectory.status, trajectory.stop_reason, trajectory.sandbox = "done", episode.stop_reason, None
        del self._live[trajectory.id]
        self._judges.submit(trajectory, episode)
        return True

    def _park(self, completion: Completion) -> None:
        trajectory, episode = self._live.pop(completion.id)
        if completion.tokens:
            trajectory.append(_policy_segment(completion))
        trajectory.status = "parked"
        try:
            trajectory.sandbox = episode.sandbox.checkpoint() if episode.sandbox is not None else None
        except Exception as e:  # the sandbox edge, as above
            fail(trajectory, "sandbox", e)
        close(trajectory, episode)


def _policy_segment(c: Completion) -> Segment:
    return Segment("policy", c.tokens, c.logprobs, c.raw_logprobs, c.policy_version)
