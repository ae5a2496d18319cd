"""A trajectory as people read it: token strings with author, policy version and log-prob (report, `nonet runs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nonet.chat import Tokenizer
from nonet.types import Task, Trajectory


def trajectory_record(
    t: Trajectory, task: Task, tokenizer: Tokenizer, step: int, columns: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Any]:
    """columns: by name, a value for each policy token: "advantage", if it was trained; what its credit explains."""
    written, segments = 0, []
    for s in t.segments:
        segment: dict[str, Any] = {
            "author": s.author,
            "version": s.policy_version,
            "tokens": list(s.tokens),
            "pieces": tokenizer.pieces(s.tokens),
            "logprobs": [round(x, 4) for x in s.logprobs],
        }
        if s.author == "policy":
            end = written + len(s.tokens)
            segment |= {name: [round(x, 4) for x in values[written:end]] for name, values in (columns or {}).items()}
            written = end
        segments.append(segment)
    return {
        "id": t.id, "task_id": t.task_id, "group": t.group, "sample": t.sample, "domain": task.domain,
        "effort": task.effort, "reward": t.reward, "rewards": t.rewards, "status": t.status,
        "stop_reason": t.stop_reason, "harness": t.harness, "step": step, "segments": segments,
        **({} if columns is None else {"trained": "advantage" in columns}),
    }  # fmt: skip
