"""The stages of the main job, in order. Each reads what earlier ones wrote to the run directory and writes its own.

tokenizer   models/start/tokenizer*.json      (a copy when the recipe starts from a model)
cold        models/cold                       next-token + MTP training on demonstrations
eval-cold   evals/cold-CELL-MODE.json          (cells.py)
rl          models/rl, budgets.json           (or experts, eval-expert, distill, eval-distill: experts.py)
eval-rl     evals/rl-CELL-MODE.json, gains
draft       models/draft                      the policy's own MTP layer made into a draft (draft_stage.py)
serve       what clients get                  (serve_stage.py)
sample, report
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nonet import report, tasks
from nonet.chat.training import train as train_tokenizer
from nonet.harness import load_spec, phrases, render_assistant
from nonet.harness.episode import demonstration
from nonet.lm.trainer import Row
from nonet.lm.trainer import train as train_lm
from nonet.model import Model, hf
from nonet.model.init import initialise
from nonet.pipeline.cells import cells_of, compare, measure
from nonet.pipeline.context import Context
from nonet.pipeline.draft_stage import draft
from nonet.pipeline.serve_stage import serve
from nonet.protocols import TaskSource
from nonet.rl.budgets import Budgets, measured
from nonet.rl.config import RLConfig
from nonet.rl.effort import budgeted
from nonet.rl.evaluate import evaluate
from nonet.rl.loop import Loop
from nonet.rl.setting import Setting, open_sandbox
from nonet.types import UserError

BUDGETS = "budgets.json"
# Demonstrations come from train indices that RL never reaches, so its prompts are new to the policy.
DEMONSTRATIONS_FROM = 10_000_000


def tokenizer(c: Context) -> None:
    start = c.models("start")
    if c.recipe.start.model:
        start.mkdir(parents=True, exist_ok=True)
        hf.copy_tokenizer(Path(c.recipe.start.model), start)
        return
    t = c.recipe.tasks
    source = tasks.load(",".join(t.sources.values()), seed=c.recipe.run.seed, difficulty=t.difficulty)
    train_tokenizer(_texts(source, c), c.recipe.start.vocab_size, start, phrases(load_spec(t.harness)))


def _texts(source: TaskSource, c: Context) -> list[str]:
    """Prompts and worked solutions as plain text, for the tokenizer's merges."""
    spec, out = load_spec(c.recipe.tasks.harness), []
    for i in range(c.recipe.start.tokenizer_rows):
        efforts = c.recipe.tasks.efforts
        task = source.task("train", DEMONSTRATIONS_FROM + i, efforts[i % len(efforts)])
        out += [m.text for m in task.prompt]
        out += [render_assistant(m, spec) for m in source.demonstrate(task) or ()]
    return out


def demonstration_rows(setting: Setting) -> Callable[[int, int], list[Row]]:
    """rows(first, count) for `lm.train`: solutions as token rows, exactly as a rollout would see them."""

    def one(index: int) -> Row:
        task = setting.task("train", DEMONSTRATIONS_FROM + index)
        turns = setting.source.demonstrate(task)
        if turns is None:
            raise UserError(f"task {task.id}: has no demonstration to learn from; drop [cold] or choose other tasks")
        sandbox = open_sandbox(task, None)
        try:
            ids, mask, _ = demonstration(task, turns, setting.spec, setting.tokenizer, sandbox)
        finally:
            if sandbox is not None:
                sandbox.close()
        return Row(ids, mask)

    return lambda first, count: [one(first + i) for i in range(count)]


def cold(c: Context) -> None:
    model = start_model(c)
    if c.recipe.cold is not None:
        train_lm(model, demonstration_rows(c.everything()), c.recipe.cold, c.run, "cold")
    c.export(model, c.models("cold"))


def start_model(c: Context) -> Model:
    if c.recipe.start.model:
        return hf.load(c.recipe.start.model)
    return initialise(Model(c.recipe.model_config_for(c.tokenizer.vocab_size)), c.recipe.run.seed)


def eval_cold(c: Context) -> None:
    measure(c, "cold", c.models("cold"), cells_of(c.recipe))


def rl(c: Context) -> None:
    model = hf.load(c.models("cold"))
    measure_budgets(c)
    loop = rl_loop(c, model, c.everything(), c.recipe.rl)
    loop.fit()
    c.export(model, c.models("rl"))
    if loop.learner.lora is not None:
        loop.learner.lora.save(c.models("rl-adapter"), base=c.models("cold"))


def measure_budgets(c: Context) -> None:
    """budgets.json, by the cold start, where the recipe limits a level."""
    effort = c.recipe.limits
    if effort is not None:
        measured(hf.load(c.models("cold")), c.everything(), effort.budget, c.recipe.rl, c.root / BUDGETS)


def rl_loop(c: Context, model: Model, setting: Setting, config: RLConfig) -> Loop:
    """With the measured budgets where the recipe limits a level."""
    effort, seed = c.recipe.limits, c.recipe.run.seed
    if effort is None:
        return Loop(model, setting, config, c.run, seed)
    return budgeted(model, setting, effort, Budgets.open(c.root / BUDGETS, effort.budget), config, c.run, seed)


def eval_rl(c: Context) -> None:
    evaluate_after(c, "rl")


def evaluate_after(c: Context, name: str) -> None:
    """Held-out reward of models/NAME, and its gains over the cold start, paired by prompt."""
    measure(c, name, c.models(name), cells_of(c.recipe))
    compare(c, "cold", name, cells_of(c.recipe))


def sample(c: Context) -> None:
    """A few greedy attempts of the final model at held-out tasks, as text."""
    model = hf.load(c.policy)
    for domain in c.recipe.tasks.sources:
        setting = c.setting(domain)
        for t in evaluate(model, setting, range(2), 0.0, c.recipe.rl.max_tokens):
            prompt = c.tokenizer.decode(t.segments[0].tokens)
            text = c.tokenizer.decode([i for s in t.segments[1:] for i in s.tokens])
            c.run.event("sample", stage="sample", prompt=prompt, text=text)


def write_report(c: Context) -> None:
    report.write(c.run.path)


Stage = tuple[str, Callable[[Context], None]]
BEGIN: tuple[Stage, ...] = (("tokenizer", tokenizer), ("cold", cold), ("eval-cold", eval_cold))
ONE_RUN: tuple[Stage, ...] = (("rl", rl), ("eval-rl", eval_rl))
END: tuple[Stage, ...] = (("draft", draft), ("serve", serve), ("sample", sample), ("report", write_report))
