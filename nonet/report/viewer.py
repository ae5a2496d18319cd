"""The trajectories that the page carries: compact JSON that is safe inside a script element.

Owns the embedded format and its size. Invariant: the text has no `<`, `>`, `&` and only ASCII, so no token piece can
end the element or start markup, and it never exceeds BUDGET bytes. Refuses tokens beyond MOST_TOKENS of one trajectory;
the reader says how many it left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from nonet.report.read import number, printable, table, text
from nonet.report.trajectories import Summary, load

BUDGET = 1_300_000
MOST_TOKENS = 1500
_AUTHORS = {"prompt": "p", "policy": "m", "tool": "t"}
_COLUMNS = ("logprobs", "advantage", "teacher_log_ratio")
_UNSAFE = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def embed(chosen: Iterable[Summary]) -> tuple[Markup, int]:
    """A JSON list of trajectories and how many it holds.

    Each: {id, task, domain, effort, reward, rewards: [[name, value], ...], status, stop, harness, where, versions,
    policy, trained: true, false or null where it is not known, cut,
    s: [[author p|m|t, version, [piece, ...], log-probs, advantages, teacher's log-ratios], ...]}

    The last three, of policy segments alone: a list of a number or null for each piece; one number where all are equal;
    null where none is recorded.
    """
    kept: list[str] = []
    room = BUDGET
    for summary in chosen:
        record = load(summary)
        if record is None:
            continue
        item = safe_json(_compact(summary, record))
        if len(item) + 2 <= room:
            room -= len(item) + 2
            kept.append(item)
    return Markup("[" + ",\n".join(kept) + "]"), len(kept)


def safe_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def _compact(summary: Summary, record: dict[str, Any]) -> dict[str, Any]:
    segments, cut = _segments(record)
    return {
        "id": text(record, "id", "unnamed"),
        "task": text(record, "task_id", "unnamed task"),
        "domain": summary.domain,
        "effort": text(record, "effort"),
        "reward": None if summary.reward is None else round(summary.reward, 4),
        "rewards": _rewards(record),
        "status": text(record, "status"),
        "stop": text(record, "stop_reason"),
        "harness": text(record, "harness"),
        "where": summary.where,
        "versions": summary.versions,
        "policy": summary.policy_tokens,
        "trained": trained if isinstance(trained := record.get("trained"), bool) else None,
        "cut": cut,
        "s": segments,
    }


def _segments(record: dict[str, Any]) -> tuple[list[list[Any]], int]:
    out: list[list[Any]] = []
    room, cut = MOST_TOKENS, 0
    for s in record["segments"]:
        pieces = s["pieces"][:room]
        cut += len(s["pieces"]) - len(pieces)
        room -= len(pieces)
        if not pieces:
            continue
        author = _AUTHORS.get(str(s.get("author")), "t")
        version = int(number(s, "version") or 0)
        columns = [_column(s, name, len(pieces)) for name in _COLUMNS] if author == "m" else []
        out.append([author, version, [_piece(p) for p in pieces], *columns])
    return out, cut


def _rewards(record: dict[str, Any]) -> list[tuple[str, float]]:
    """What the reward is the sum of."""
    parts = table(record, "rewards")
    named = [(printable(name, 40), number(parts, name)) for name in list(parts)[:8]]
    return [(name, round(value, 4)) for name, value in named if value is not None]


def _piece(piece: Any) -> str:
    written = piece if isinstance(piece, str) else text({"piece": piece}, "piece")
    return written if len(written) <= 80 else written[:79] + "…"


def _column(segment: dict[str, Any], name: str, count: int) -> list[float | None] | float | None:
    given = segment.get(name)
    values = given[:count] if isinstance(given, list) else []
    numbers = [number({"v": v}, "v") for v in values] + [None] * (count - len(values))
    rounded = [None if n is None else round(n, 3) for n in numbers]
    return rounded if len(set(rounded)) > 1 else rounded[0]
