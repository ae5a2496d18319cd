"""The stages of the main job, in order. Each reads what earlier ones wrote to the run directory and writes its own.

tokenizer   models/start/tokenizer*.json      (a copy when the recipe starts from a model)
cold        models/cold                       next-token + MTP training on demonstrations
eval-cold   evals/cold-DOMAIN-MODE.json
rl          models/rl
eval-rl     evals/rl-DOMAIN-MODE.json, gains
draft       models/draft                      the policy's own MTP layer made into a draft (draft_stage.py)
sample, report
"""

from __future__ import annotations

import json
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
from nonet.pipeline.context import Context
from nonet.pipeline.draft_stage import draft
from nonet.protocols import TaskSource
from nonet.rl.evaluate import eval_event, evaluate, gain, rewards_by_task
from nonet.rl.loop import Loop
from nonet.rl.record import trajectory_record
from nonet.rl.setting import Setting, open_sandbox
from nonet.run import write_atomic
from nonet.types import UserError

# Demonstrations come from train indices that RL never reaches, so its prompts are new to the policy.
DEMONSTRATIONS_FROM = 10_000_000
MODES = {"sampled": 1.0, "greedy": 0.0}


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
    export(c, model, "cold")


def start_model(c: Context) -> Model:
    if c.recipe.start.model:
        return hf.load(c.recipe.start.model)
    return initialise(Model(c.recipe.model_config_for(c.tokenizer.vocab_size)), c.recipe.run.seed)


def export(c: Context, model: Model, name: str) -> None:
    hf.save(model, c.models(name))
    hf.copy_tokenizer(c.models("start"), c.models(name))


def _evaluate(c: Context, name: str) -> None:
    model = hf.load(c.models(name))
    folder = c.run.path / "evals"
    folder.mkdir(exist_ok=True)
    for domain, spec in c.recipe.tasks.sources.items():
        setting = c.setting(spec)
        for mode, temperature in MODES.items():
            done = evaluate(
                model, setting, range(c.recipe.eval.prompts), temperature, c.recipe.rl.max_tokens, c.recipe.rl.max_batch
            )
            write_atomic(folder / f"{name}-{domain}-{mode}.json", json.dumps(rewards_by_task(done)))
            c.run.event("eval", stage=f"eval-{name}", domain=domain, source=spec, mode=mode, **eval_event(done))
            records = [trajectory_record(t, setting.task("heldout", t.group), c.tokenizer, 0) for t in done[:6]]
            c.run.write_trajectories(f"eval-{name}-{domain}-{mode}", records)


def eval_cold(c: Context) -> None:
    _evaluate(c, "cold")


def rl(c: Context) -> None:
    model = hf.load(c.models("cold"))
    loop = Loop(model, c.everything(), c.recipe.rl, c.run, c.recipe.run.seed)
    loop.fit()
    export(c, model, "rl")
    if loop.learner.lora is not None:
        loop.learner.lora.save(c.models("rl-adapter"), base=c.models("cold"))


def eval_rl(c: Context) -> None:
    evaluate_after(c, "rl")


def evaluate_after(c: Context, name: str) -> None:
    """Held-out reward of models/NAME, and its gains over the cold start, paired by prompt."""
    _evaluate(c, name)
    for domain in c.recipe.tasks.sources:
        for mode in MODES:
            before, after = (
                json.loads((c.run.path / "evals" / f"{n}-{domain}-{mode}.json").read_text()) for n in ("cold", name)
            )
            e = gain(before, after)
            c.run.event(
                "gain", stage=f"eval-{name}", domain=domain, mode=mode, n=e.n, gain=e.mean, low=e.low, high=e.high
            )


def sample(c: Context) -> None:
    """A few greedy attempts of the final model at held-out tasks, as text."""
    model = hf.load(c.models("rl"))
    for spec in c.recipe.tasks.sources.values():
        setting = c.setting(spec)
        for t in evaluate(model, setting, range(2), 0.0, c.recipe.rl.max_tokens):
            prompt = c.tokenizer.decode(t.segments[0].tokens)
            text = c.tokenizer.decode([i for s in t.segments[1:] for i in s.tokens])
            c.run.event("sample", prompt=prompt, text=text)


def write_report(c: Context) -> None:
    report.write(c.run.path)


STAGES: tuple[tuple[str, Callable[[Context], None]], ...] = (
    ("tokenizer", tokenizer),
    ("cold", cold),
    ("eval-cold", eval_cold),
    ("rl", rl),
    ("eval-rl", eval_rl),
    ("draft", draft),
    ("sample", sample),
    ("report", write_report),
)

# What a stage writes as a whole: when a killed one starts over, (kind, stage) it had already recorded is dropped.
# Training stages continue from a checkpoint instead and drop only what came after it.
EVENTS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "eval-cold": (("eval", "eval-cold"),),
    "eval-rl": (("eval", "eval-rl"), ("gain", "eval-rl")),
    "eval-distill": (("eval", "eval-distill"), ("gain", "eval-distill")),
    "draft": (("draft_measured", "draft"),),
    "sample": (("sample", None),),
}
