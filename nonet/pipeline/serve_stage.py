"""The stage "serve" of `nonet run`: what clients get. Held-out tasks are played over HTTP against `nonet serve`, once
on the policy alone and once with its draft.

OUT/serve/alone.txt, drafted.txt    what the servers printed

Greedy text is the same with a draft (drafts are lossless), so there both servers do the same work and the ratio of
their seconds is the draft's speed-up as a client sees it, the environment's time included.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nonet.model import hf
from nonet.pipeline.cells import MODES, Cell, cells_of
from nonet.pipeline.context import Context
from nonet.rl.evaluate import eval_event, played
from nonet.types import UserError

READY_S = 300.0  # a large model takes a while to load
# A server must not outlive the run that started it, however that ends.
_SERVE = "from nonet.pipeline.lanes import end_with_parent; end_with_parent(); from nonet.cli import main; main()"


def serve(c: Context) -> None:
    """Events "served", a cell and mode each."""
    table, drafted = c.recipe.serve, (c.models("draft") / "config.json").exists()
    if not table.prompts:
        return
    more = {"alone": (), "drafted": ("--draft", str(c.models("draft")), "--draft-tokens", str(table.tokens))}
    with ExitStack() as servers:
        urls = {
            name: servers.enter_context(served(c.policy, c.run.path / "serve" / f"{name}.txt", options))
            for name, options in more.items()
            if name == "alone" or drafted
        }
        for mode, temperature in MODES.items():
            for cell in cells_of(c.recipe):
                found = {name: _ask(c, url, cell, temperature) for name, url in urls.items()}
                c.run.event("served", stage="serve", domain=cell.name, mode=mode, **compared(found))


def compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """found: figures of "alone" and, where there is a draft, of "drafted". speedup: of seconds a token."""
    alone, drafted = found["alone"], found.get("drafted")
    if drafted is None:
        return {"alone": alone}
    seconds = [f["seconds"] / max(1, f["tokens"]) for f in (alone, drafted)]
    return {"alone": alone, "drafted": drafted, "speedup": seconds[0] / seconds[1]}


def _ask(c: Context, url: str, cell: Cell, temperature: float) -> dict[str, Any]:
    """Reward with its interval, seconds, tokens, and what became of drafted ones."""
    from nonet.rl.remote import Remote  # its HTTP client is an extra

    table, setting = c.recipe.serve, cell.setting(c)
    remote = Remote(url, hf.read_config(c.policy).max_position, table.clients)
    began = time.perf_counter()
    try:
        done = played(remote, setting, range(table.prompts), temperature, c.recipe.rl.max_tokens, table.prompts)
    finally:
        remote.close()
    seconds = time.perf_counter() - began
    tokens = sum(t.policy_tokens for t in done)
    return {**eval_event(done), "seconds": seconds, "tokens": tokens, "asked": remote.drafted, "stood": remote.accepted}


@contextmanager
def served(model: Path, log: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The address of `nonet serve MODEL` with its /v1. What it prints goes to `log`; it ends with the context, or with
    this process. UserError where it does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-c", _SERVE, "serve", str(model), "--port", "0", *options)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """As the banner says it."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        said = log.read_text(errors="replace")
        if found := re.search(r" at (http://\S+/v1)", said):
            return found[1]
        if process.poll() is not None:
            last = (said.strip() or "nothing was printed").splitlines()[-1]
            raise UserError(f"serve: ended with status {process.returncode}: {last} (all of it: {log})")
        time.sleep(0.05)
    raise UserError(f"serve: no address after {READY_S:.0f} s; what it printed: {log}")
