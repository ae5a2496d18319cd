"""One trajectory of more than 64k tokens through many policy versions: what `on_resume` costs, and how far off it is.

The whole RL loop over a small KDA hybrid with random weights. Sample 0 of group 0 reads a book through a scripted tool,
a page of 5,504 tokens a turn; its sibling and the other groups answer in one. The loop pauses when half of what is
active has ended, so that the long trajectory is parked, and goes on under new weights, at every iteration, until the
book is read and the trajectory is trained.

    reprefill   its tokens are computed again at each version: prefilled, seconds
    reuse       it goes on from what older versions remembered: mismatch, the difference in log-probs of the next token
                from a fresh prefill, over the vocabulary (the fresh prefill that measures it is in its seconds)

cost_ratio: prompt tokens computed under reprefill over those under reuse. --only short: pages of 128 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from nonet.bench.rl_step_worker import write_tokenizer
from nonet.chat import Tokenizer
from nonet.engine import Engine
from nonet.harness import Episode, load_spec
from nonet.model import Model, ModelConfig
from nonet.model.init import initialise
from nonet.progress import progress
from nonet.protocols import Sandbox
from nonet.rl import Loop, RLConfig, park
from nonet.rl.setting import Setting, Split
from nonet.run import Run
from nonet.tasks import load
from nonet.types import Message, Segment, Task, Trajectory, UserError

PAGES, PAGE, SHORT_PAGE = 12, 5504, 128
LIMIT = 100  # iterations; the book is read long before
How = Literal["reprefill", "reuse"]
ON_RESUME: tuple[How, ...] = ("reprefill", "reuse")


def measure(only: Sequence[str] = ()) -> dict[str, Any]:
    if list(only) not in ([], ["short"]):
        raise UserError(f"bench relay: only {','.join(only)!r}: there is only short")
    torch.set_num_threads(1)
    page = SHORT_PAGE if only else PAGE
    with TemporaryDirectory() as folder:
        found = {how: relayed(Path(folder) / how, how, page) for how in ON_RESUME}
    return {"cost_ratio": found["reprefill"]["prefilled"] / found["reuse"]["prefilled"], **found, "page": page}


def relayed(out: Path, how: How, page: int) -> dict[str, Any]:
    """Play until the long trajectory has been trained; what it and the iterations that carried it did."""
    out.mkdir(parents=True)
    vocab = write_tokenizer(out)
    loop = started(out, vocab, how, page)
    steps, began = [], time.perf_counter()
    with progress(f"bench relay: {how}, pages", PAGES) as bar:
        while 0 in loop.pool.held or not steps:
            if len(steps) == LIMIT:
                raise RuntimeError(f"the book was not read in {LIMIT} iterations")
            steps.append(loop.iterate())
            long = loop.pool.held.get(0, [None])[0]
            bar(PAGES if long is None else sum(s.author == "tool" for s in long.segments), f"version {len(steps)}")
    long = park.read(park.files(out / "park")[-1]).gone[0][0]
    worst = max(steps, key=lambda e: e["mismatch_max"])
    return {
        "tokens": len(long.tokens), "policy_tokens": long.policy_tokens, "versions": len(long.versions),
        "iterations": len(steps), "prefilled": sum(e["prefilled"] for e in steps),
        "cached": sum(e["cached"] for e in steps), "mismatch_max": worst["mismatch_max"],
        "mismatch_mean": max(e["mismatch_mean"] for e in steps), "ratio_max": max(e["ratio_max"] for e in steps),
        "rollout_s": sum(e["rollout_s"] for e in steps), "update_s": sum(e["update_s"] for e in steps),
        "seconds": time.perf_counter() - began, "park_bytes": sum(f.stat().st_size for f in park.files(out / "park")),
    }  # fmt: skip


def started(out: Path, vocab: int, how: How, page: int) -> Loop:
    # Keys as wide as values: torch then trains a row of 66k tokens without its square of scores (35 GB).
    shape = ModelConfig(
        vocab_size=vocab, d_model=64, layers=4, d_ff=128, heads=2, kda_head_dim=16, decay_rank=8, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    model = initialise(Model(shape), 0)
    source, spec = load("general.add"), load_spec("plain")
    setting = Reading(source, spec, Curt(out), {"variety": variety}, ("max",), page=page)
    config = RLConfig(
        steps=LIMIT, groups=2, samples=2, fraction=0.5, max_tokens=8192, on_resume=how, lr=1e-3, warmup=0,
        minibatches=1, max_batch=8, keep_groups=0,
    )  # fmt: skip
    engine = Engine(model, config.max_batch, chunk=2048, cache_bytes=1 << 30)
    loop = Loop(model, setting, config, Run(out), engine=engine)
    loop.park.start()
    return loop


def variety(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """Different letters in what was said last: siblings differ, so that every group trains."""
    return len(set(transcript[-1].text)) / 64


class Curt(Tokenizer):
    """Random weights seldom end a turn, so more ids do: every thirty-second byte."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        return (*super().stop_ids, *range(0, 256, 32))


@dataclass(frozen=True)
class Reading(Setting):
    """page: tokens of a page."""

    page: int = PAGE

    def opener(self, split: Split) -> Callable[[Trajectory], Episode]:
        def open_episode(trajectory: Trajectory) -> Episode:
            pages = PAGES if (trajectory.group, trajectory.sample) == (0, 0) else 0
            read = sum(s.author == "tool" for s in trajectory.segments)
            return Reader(self.task(split, trajectory.group), self, pages, read)

        return open_episode


class Reader(Episode):
    """Whatever the policy writes in a turn calls the tool, which reads out the next page, until there is none."""

    def __init__(self, task: Task, setting: Reading, pages: int, read: int):
        super().__init__(task, setting.spec, setting.tokenizer, None)
        self.page, self.pages, self.turns = setting.page, pages, read

    def observe(self, turn: Sequence[int]) -> Segment | None:
        self._read(turn)
        if self.turns > self.pages:
            self.stop_reason = "stop"
            return None
        text = "".join(chr(97 + (self.turns + i * i) % 26) for i in range(self.page))
        tokens = self.tokenizer.continuation([{"role": self.spec.tool_role, "content": text}])
        return Segment("tool", tuple(tokens), texts=(text,))
