"""Play trajectories against a Generator until enough have ended; park the rest.

Invariant: what the policy wrote is appended as it came, ids and log-probs together; nothing is decoded and encoded
again. A failure at a sandbox edge ends that trajectory with a stop reason that says so, and no other. Rewards are
computed in threads while generation goes on; they decide nothing before `run` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from nonet.harness import Episode
from nonet.protocols import Generator
from nonet.types import Completion, Request, Sampling, Segment, Trajectory, UserError

OpenEpisode = Callable[[Trajectory], Episode]
Score = Callable[[Trajectory, Episode], None]
_SCORERS = 2  # threads that wait for verifiers


class Rollout:
    """open_episode opens the attempt a trajectory records, new or parked; score judges it once it has ended."""

    def __init__(
        self,
        generator: Generator,
        open_episode: OpenEpisode,
        score: Score,
        sampling: Sampling,
        max_tokens: int,
    ):
        self.generator, self.open_episode, self.score = generator, open_episode, score
        self.sampling, self.max_tokens = sampling, max_tokens
        self._live: dict[str, tuple[Trajectory, Episode]] = {}
        self._scoring: list[Future[None]] = []

    def run(self, active: Sequence[Trajectory], quota: int) -> int:
        """Run until `quota` of `active` have ended (or all); park the others. Returns how many ended."""
        with ThreadPoolExecutor(_SCORERS) as self._judges:
            ended = sum(self._open(t) for t in active)
            while ended < quota and self.generator.busy:
                for completion in self.generator.step():
                    ended += self._advance(completion)
            for completion in self.generator.pause():
                self._park(completion)
        for judged in self._scoring:
            judged.result()
        self._scoring.clear()
        return ended

    # each of these returns True when the trajectory has ended

    def _open(self, trajectory: Trajectory) -> bool:
        try:
            episode = self.open_episode(trajectory)
        except UserError:
            raise
        except Exception as e:  # the sandbox edge: any failure there is data about this trajectory
            return _fail(trajectory, "sandbox", e)
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
        stream = f"{trajectory.task_id}#{trajectory.group}/{trajectory.sample}"
        stops = episode.tokenizer.stop_ids
        request = Request(trajectory.id, trajectory.tokens, left, stops, self.sampling, stream, hold=True)
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
            _close(trajectory, episode)
            return _fail(trajectory, "sandbox", e)
        if result is None:
            return self._end(trajectory, episode)
        trajectory.append(result)
        return self._ask(trajectory, episode)

    def _end(self, trajectory: Trajectory, episode: Episode) -> bool:
        trajectory.status, trajectory.stop_reason, trajectory.sandbox = "done", episode.stop_reason, None
        del self._live[trajectory.id]
        self._scoring.append(self._judges.submit(self._judge, trajectory, episode))
        return True

    def _judge(self, trajectory: Trajectory, episode: Episode) -> None:
        try:
            self.score(trajectory, episode)
        finally:
            _close(trajectory, episode)

    def _park(self, completion: Completion) -> None:
        trajectory, episode = self._live.pop(completion.id)
        if completion.tokens:
            trajectory.append(_policy_segment(completion))
        trajectory.status = "parked"
        try:
            trajectory.sandbox = episode.sandbox.checkpoint() if episode.sandbox is not None else None
        except Exception as e:  # the sandbox edge, as above
            _fail(trajectory, "sandbox", e)
        _close(trajectory, episode)


def _close(trajectory: Trajectory, episode: Episode) -> None:
    try:
        if episode.sandbox is not None:
            episode.sandbox.close()
    except Exception as e:  # the sandbox edge, as above
        _fail(trajectory, "sandbox", e)


def _policy_segment(c: Completion) -> Segment:
    return Segment("policy", c.tokens, c.logprobs, c.raw_logprobs, c.policy_version)


def _fail(trajectory: Trajectory, edge: str, error: Exception) -> bool:
    trajectory.status, trajectory.stop_reason = "failed", f"{edge}: {type(error).__name__}: {error}"
    return True
