"""`nonet distill`: experts into one student, in the stages of a run. The loop is RL's; its credit is the experts'.

tokenizer      models/start                 the student's
preflight      what could be wrong with the experts, as a table
cold           models/cold                  a copy of the student
eval-cold      evals/cold-*.json            held-out reward before
distill        models/distill
eval-distill   evals/distill-*.json, gains
report
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nonet.chat import Tokenizer
from nonet.config import build, merge, read
from nonet.model import hf, peft
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import Recipe, by_domain
from nonet.pipeline.runner import print_table, run_stages
from nonet.pipeline.stages import BEGIN, Stage, evaluate_after, write_report
from nonet.rl.config import RLConfig
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.opd import distilling
from nonet.rl.setting import Cell, Setting
from nonet.rl.teacher import LocalTeacher, Teacher, teacher_prompt
from nonet.types import UserError


def distill_recipe(
    student: Path,
    experts: Sequence[str],
    tasks: str,
    reward: str,
    harness: str,
    eval_prompts: int,
    overrides: Sequence[str],
) -> Recipe:
    """The recipe behind `nonet distill`. experts: "domain:effort=WHERE" each."""
    values: dict[str, Any] = {
        "start": {"model": str(student)},
        "tasks": {"sources": by_domain(tasks), "reward": reward, "harness": harness},
        "rl": {"groups": 16, "samples": 4, "max_batch": 64, "lr": 1e-5, "micro_tokens": 2048, "save_every_s": 120.0},
        "distill": {"experts": named(experts)},
        "eval": {"prompts": eval_prompts},
    }
    values = merge(values, read([], overrides))
    config = build(DistillConfig, values["distill"], "distill")
    if not config.experts:
        raise UserError("distill.experts: none; name at least one, e.g. --expert general:max=runs/general/models/rl")
    return build(Recipe, merge(values, {"tasks": {"efforts": config.efforts}}))


def named(experts: Sequence[str]) -> dict[str, str]:
    """ "domain:effort=WHERE" -> by name. UserError for another form, and for a name given twice."""
    out: dict[str, str] = {}
    for text in experts:
        name, equals, where = text.partition("=")
        if not (equals and name and where):
            raise UserError(f"--expert {text}: write it as domain:effort=DIR or domain:effort=http://host/v1")
        if name in out:
            raise UserError(f"--expert {text}: {name} is already {out[name]}; one expert for each domain and effort")
        out[name] = where
    return out


def run_distill(recipe: Recipe, out: Path) -> None:
    """Every stage whose marker is missing; ends with the held-out table."""
    print_table(run_stages(recipe, out, STAGES))


def preflight(c: Context) -> None:
    """A table that says of each expert all that could be wrong with it; UserError for what is."""
    setting, config = c.everything(), c.recipe.distill
    experts = Experts.open(config)
    shares = experts.shares(setting)
    table = Table(title="experts")
    for column in ("expert", "tasks", "teacher", "kind", "vocabulary", "template", "weights", "prompt tokens"):
        table.add_column(column)
    for cell, teacher in experts.teachers.items():
        teacher.require_vocabulary(setting.tokenizer, f"expert {':'.join(cell)}")
        facts = _of_local(teacher, setting.tokenizer, config.dtype) if isinstance(teacher, LocalTeacher) else _SERVED
        told = (facts["kind"], "equal", facts["template"], facts["weights"], _prompts(setting, cell, config))
        table.add_row(":".join(cell), f"{shares[cell]:.0%}", teacher.where, *told)
    Console(width=160).print(table)
    _check_loss(config, experts.teachers)


_SERVED = {"kind": "server", "template": "the student's", "weights": "elsewhere"}


def _of_local(teacher: LocalTeacher, student: Tokenizer, dtype: str) -> dict[str, str]:
    """What can be told of a teacher on this machine without loading it."""
    numbers = sum(prod(shape) for shape in hf.expected(hf.read_config(teacher.base)).values())
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    same = Tokenizer(teacher.base).template == student.template
    return {
        "kind": f"LoRA on {teacher.base}" if peft.is_adapter(teacher.where) else "directory",
        "template": "same" if same else "another; it reads the student's",
        "weights": f"{dtype}, {numbers * width / 1e6:,.1f} MB while it is asked",
    }


def _prompts(setting: Setting, cell: Cell, config: DistillConfig) -> str:
    """How long the first prompt of this expert's is for the student and for it."""
    tasks = (setting.task("train", i) for i in range(1 << 20))
    task = next(t for t in tasks if (t.domain, t.effort) == cell)
    student, teacher = teacher_prompt(setting, task, True), teacher_prompt(setting, task, config.teacher_effort)
    same = ", the same" if student == teacher else ""
    return f"{len(student)} student, {len(teacher)} teacher{same}"


def _check_loss(config: DistillConfig, teachers: Mapping[Cell, Teacher]) -> None:
    served = [t.where for t in teachers.values() if not isinstance(t, LocalTeacher)]
    if config.loss != "reward" and served:
        raise UserError(
            f"distill.loss = {config.loss}: needs the teacher's whole distribution, and {served[0]} tells log-probs of "
            "given tokens only; name its directory, or set distill.loss = reward"
        )


def distill(c: Context) -> None:
    """models/cold, taught by the experts of [distill]."""
    teach(c, c.recipe.distill, c.recipe.rl)


def teach(c: Context, config: DistillConfig, rl: RLConfig) -> None:
    model, experts = hf.load(c.models("cold")), Experts.open(config, rl.deterministic)
    distilling(model, c.everything(), config, experts, rl, c.run, c.recipe.run.seed).fit()
    c.export(model, c.models("distill"))


def eval_distill(c: Context) -> None:
    evaluate_after(c, "distill")


TAUGHT: tuple[Stage, ...] = (("distill", distill), ("eval-distill", eval_distill))
STAGES: tuple[Stage, ...] = (BEGIN[0], ("preflight", preflight), *BEGIN[1:], *TAUGHT, ("report", write_report))
