"""The other ways to make one model of a run's experts, each from the run's cold start and at the student's tokens.

average    the mean of all experts' weights; no tokens
mixed      RL on all cells at once, by the tasks' own rewards (and budgets)
sft        next-token training on the experts' own successful attempts at their cells
kl_topk, kl_full    on-policy distillation with reverse KL in the loss (rl/kl.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from nonet.lm.trainer import LMConfig, Row
from nonet.lm.trainer import train as train_lm
from nonet.model import Model, hf
from nonet.pipeline.cells import Cell, cells_of
from nonet.pipeline.context import Context
from nonet.pipeline.experts import model_of, teaching
from nonet.pipeline.stages import rl_loop
from nonet.rl.distill import Experts
from nonet.rl.evaluate import evaluate
from nonet.rl.loop import Loop
from nonet.rl.opd import distilling
from nonet.types import Trajectory, UserError

RIVALS = ("average", "mixed", "sft", "kl_topk", "kl_full")
PLAYED_FROM = 30_000_000  # train indices that neither demonstrations, RL nor drafts reach
AT_ONCE, MOST = 256, 100_000  # attempts of an expert
SUCCESS = 1.0  # reward
SFT_RATE = 0.25  # of the cold start's peak rate


def rival(name: str, c: Context, tokens: int) -> tuple[Model, int]:
    """The model, and how many tokens it took. c: of the run, but that events go to a directory of the rival's."""
    if name == "average":
        return average([model_of(c.root, cell) for cell in cells_of(c.recipe)]), 0
    model = hf.load(c.models("cold"))
    if name == "sft":
        return model, taught_by_text(c, model, tokens)
    return model, spent(loop_of(name, c, model), tokens)


def average(folders: Sequence[Path]) -> Model:
    models = [hf.load(folder) for folder in folders]
    states = [m.state_dict() for m in models]
    mean = {
        key: torch.stack([s[key].double() for s in states]).mean(0).to(w.dtype) if w.is_floating_point() else w
        for key, w in states[0].items()
    }
    models[0].load_state_dict(mean)
    return models[0]


def loop_of(name: str, c: Context, model: Model) -> Loop:
    config, rl = teaching(c)
    if name == "mixed":
        return rl_loop(c, model, c.everything(), rl)
    config = config.model_copy(update={"loss": name})
    experts = Experts.open(config, rl.deterministic)
    return distilling(model, c.everything(), config, experts, rl, c.run, c.recipe.run.seed)


def spent(loop: Loop, tokens: int) -> int:
    """Iterate until so many tokens were trained on; the learning rate stays at its end beyond the last step."""
    loop.park.start()
    total = 0
    while total < tokens:
        total += int(loop.iterate()["tokens"])
    return total


def taught_by_text(c: Context, model: Model, tokens: int) -> int:
    """One pass over the experts' successful attempts, the same number of tokens of each."""
    assert c.recipe.cold is not None
    found = cells_of(c.recipe)
    attempts = [t for cell in found for t in successes(c, cell, tokens // len(found))]
    order = torch.randperm(len(attempts), generator=torch.Generator().manual_seed(c.recipe.run.seed)).tolist()
    rows = [row_of(attempts[i]) for i in order]
    cold = c.recipe.cold
    config = LMConfig(
        steps=max(1, len(rows) // cold.batch), batch=cold.batch, optimizer=cold.optimizer, lr=cold.lr * SFT_RATE
    )
    train_lm(
        model, lambda first, count: [rows[i % len(rows)] for i in range(first, first + count)], config, c.run, "sft"
    )
    return sum(t.policy_tokens for t in attempts)


def successes(c: Context, cell: Cell, tokens: int) -> Iterator[Trajectory]:
    """An expert's attempts with full reward on its own cell, until they hold so many tokens of its own. UserError where
    it hardly ever succeeds.
    """
    expert, setting, rl = hf.load(model_of(c.root, cell)), cell.setting(c), c.recipe.rl
    total = 0
    for at in range(PLAYED_FROM, PLAYED_FROM + MOST, AT_ONCE):
        for t in evaluate(expert, setting, range(at, at + AT_ONCE), 1.0, rl.max_tokens, AT_ONCE, "train"):
            if t.status == "done" and t.reward >= SUCCESS:
                total += t.policy_tokens
                yield t
            if total >= tokens:
                return
    raise UserError(f"bench merging: expert {cell.name}: {MOST} attempts hold only {total} tokens of successful ones")


def row_of(t: Trajectory) -> Row:
    return Row(t.tokens, [s.author == "policy" for s in t.segments for _ in s.tokens])
