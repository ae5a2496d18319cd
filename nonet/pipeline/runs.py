"""`nonet runs`: park stores as tables, and a trajectory as text with its authors and versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nonet.chat import Tokenizer
from nonet.rl import park
from nonet.types import Trajectory, UserError


def print_runs(folder: Path) -> None:
    """UserError if no directory below `folder` is a run with a park store."""
    stores = sorted(p.parent for p in folder.glob("*/park") if park.files(p))
    if not stores:
        raise UserError(f"{folder}: no run in it has a park store; give the folder that your --out directories are in")
    table = Table("run", "step", "trained", "dropped", "groups held", "trajectories held")
    for run in stores:
        found = read(run)
        why = Counter(reason.split()[0] for reason in found.released.values())
        held = Counter(t.status for members in found.held.values() for t in members)
        statuses = ", ".join(f"{n} {status}" for status, n in sorted(held.items()))
        step = str(int(last_step(run).get("step", 0)))
        table.add_row(run.name, step, str(why["trained"]), str(why["dropped"]), str(len(found.held)), statuses)
    Console().print(table)


def print_run(run: Path) -> None:
    found, version = read(run), int(last_step(run).get("version", 0))
    columns = ("id", "task", "status", "attempt", "age", "versions", "tokens", "written", "sandbox", "reward", "reason")
    table = Table(*columns, title=f"{run}: {len(found.held)} groups held at version {version}")
    for members in found.held.values():
        for t in members:
            table.add_row(*(escape(str(cell)) for cell in _cells(t, version)))
    Console(width=max(Console().width, 150)).print(table)
    if found.torn:
        print(f"the last {found.torn} bytes are a record that is not whole: the run is writing it, or was killed there")


def _cells(t: Trajectory, version: int) -> Iterator[Any]:
    yield from (t.id, t.task_id, t.status, t.attempt)
    yield version - t.versions[0] if t.versions else "-"
    yield " ".join(map(str, t.versions)) or "-"
    yield from (len(t.tokens), t.policy_tokens)
    yield f"{len(json.dumps(t.sandbox))} bytes" if t.sandbox is not None else "-"
    yield f"{t.reward:.3f}" if t.rewards else "-"
    yield t.stop_reason or "-"


def print_trajectory(run: Path, name: str, tokenizer: Path | None) -> None:
    """UserError if the store does not hold it, or nothing says what its tokens mean."""
    found = read(run)
    everyone = [t for groups in (found.held, found.gone) for members in groups.values() for t in members]
    t = next((t for t in everyone if t.id == name), None)
    if t is None:
        raise UserError(f"trajectory {name!r}: not in the park store of {run}; `nonet runs show {run}` lists what is")
    decode = Tokenizer(tokenizer or own_tokenizer(run)).decode
    fate = found.released.get(t.group, "in the pool")
    print(f"{t.id} of {t.task_id}: {t.status}{f' ({t.stop_reason})' if t.stop_reason else ''}, {fate}")
    print(f"attempt {t.attempt}, harness {t.harness}, random stream {t.stream!r} of seed {found.seed}")
    if t.rewards:
        print("rewards " + ", ".join(f"{k} {v:.4g}" for k, v in t.rewards.items()))
    for s in t.segments:
        by = f"policy, version {s.policy_version}, log-prob {sum(s.logprobs):.3f}" if s.author == "policy" else s.author
        print(f"\n--- {by}, {len(s.tokens)} tokens\n{decode(s.tokens)}")


def read(run: Path) -> park.Parked:
    stores = park.files(run / "park")
    if not stores:
        raise UserError(f"{run}: no park store; give a run directory in which RL has begun")
    return park.read(stores[-1])


def last_step(run: Path) -> dict[str, Any]:
    """The last rl_step event; what another process is still writing is not one."""
    file = run / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    steps = [event for event in map(json.loads, lines) if event["kind"] == "rl_step"]
    return steps[-1] if steps else {}


def own_tokenizer(run: Path) -> Path:
    found = sorted((run / "models").glob("*/tokenizer.json"))
    if not found:
        raise UserError(f"{run}: holds no model directory to decode with; give one with --tokenizer")
    return found[-1].parent
