"""Our side of `opd_step`, a process of its own: `Loop.iterate()` as `nonet distill` calls it, one iteration per "go".

Rollout with fraction 1, the teacher's forward over the same attempts, rewards, learner. Makes the teacher's directory
beside what rl_step_worker makes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nonet.bench.rl_step_worker import Endless, check, loop_config, prepare, questions_of, write_model
from nonet.bench.turns import Turns
from nonet.bench.workload import Workload
from nonet.model import hf
from nonet.protocols import Sandbox
from nonet.rl import Loop
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.opd import distilling
from nonet.rl.setting import Setting
from nonet.run import Run
from nonet.types import HarnessSpec, Message, Task


def main(folder: Path) -> None:
    turns = Turns()
    work = Workload.read(folder)
    torch.set_num_threads(work.threads)
    prepare(work, folder)
    parameters = write_model(teacher_of(work), folder / "teacher")
    loop = open_loop(work, folder)
    turns.ready(
        threads=torch.get_num_threads(),
        parameters=loop.learner.model.parameter_count(),
        teacher_parameters=parameters,
    )
    while turns.wait():
        metrics = loop.iterate()
        check(metrics["tokens"], metrics["trained_tokens"], work)
        turns.step(generation_s=metrics["rollout_s"], update_s=metrics["update_s"])
    turns.done()


def teacher_of(work: Workload) -> Workload:
    """Twice as wide, half as deep again."""
    wide = replace(work, hidden=2 * work.hidden, intermediate=2 * work.intermediate, seed=work.seed + 1)
    return replace(wide, layers=work.layers * 3 // 2)


def open_loop(work: Workload, folder: Path) -> Loop:
    setting = Setting(questions_of(folder), HarnessSpec("bench"), Endless(folder / "model"), {"none": _none})
    config = DistillConfig(experts={"general:max": str(folder / "teacher")})
    experts = Experts.open(config)
    experts.require(setting.tokenizer)
    student, run = hf.load(folder / "model"), Run(folder / "run")
    loop = distilling(student, setting, config, experts, loop_config(work), run, work.seed)
    loop.park.start()  # as `fit` does in a new run
    return loop


def _none(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """TRL's trainers have no rewards either."""
    return 0.0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
