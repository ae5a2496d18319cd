"""TRL's side of `nonet bench opd_step`: DistillationTrainer or GKDTrainer in its own venv, one step per "go".

Both distil fully on-policy with reverse KL over the vocabulary at temperature 1 (beta 1, GKD's lmbda 1) from a local
teacher. Set for speed like trl_step.py. Usage: trl_opd.py FOLDER distillation|gkd
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_step import Gate, shared

from nonet.bench.turns import Turns
from nonet.bench.workload import Workload, read_prompts


def main(folder: Path, peer: str) -> None:
    turns = Turns()
    work = Workload.read(folder)
    torch.set_num_threads(work.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = {"distillation": distillation, "gkd": gkd}[peer](work, folder, tokenizer)
    trainer.work = work
    trainer.add_callback(Gate(turns, trainer))
    trainer.train()
    turns.done()


def distillation(work: Workload, folder: Path, tokenizer: Any) -> TimedDistillation:
    args = DistillationConfig(
        **shared(work, folder),
        beta=1.0,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        teacher_model_init_kwargs={"dtype": "float32"},
    )
    rows = [{"prompt": p.text} for p in read_prompts(folder)]
    return TimedDistillation(
        model=str(folder / "model"), teacher_model=str(folder / "teacher"), args=args,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip


def gkd(work: Workload, folder: Path, tokenizer: Any) -> TimedGKD:
    args = GKDConfig(**shared(work, folder), beta=1.0, lmbda=1.0, max_new_tokens=work.new_tokens)
    # The answers are replaced by the student's own; their length is what the loss is divided by.
    rows = [
        {
            "prompt": p.text,
            "input_ids": [*p.ids, *[p.ids[0]] * work.new_tokens],
            "completion_mask": [0] * len(p.ids) + [1] * work.new_tokens,
        }
        for p in read_prompts(folder)
    ]
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    trainer = TimedGKD(
        model=str(folder / "model"), teacher_model=teacher, args=args,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip
    trainer.generation_config.min_new_tokens = work.new_tokens
    return trainer


class TimedDistillation(DistillationTrainer):
    """Notes how long generation took within a step."""

    work: Workload
    generation_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        out = super()._generate_and_score_completions(inputs)
        self.generation_s = time.perf_counter() - began
        check(out["completion_mask"], self.work)
        return out


class TimedGKD(GKDTrainer):
    """The same; generation is a static method there, given the model alone."""

    work: Workload
    generation_s = 0.0

    def generate_on_policy_outputs(self, model: Any, inputs: Any, generation_config: Any) -> Any:
        began = time.perf_counter()
        ids, mask, labels = GKDTrainer.generate_on_policy_outputs(model, inputs, generation_config)
        self.generation_s = time.perf_counter() - began
        check(mask[:, inputs["prompts"].shape[1] :], self.work)
        return ids, mask, labels


def check(mask: torch.Tensor, work: Workload) -> None:
    """The stated work was done."""
    if tuple(mask.shape) != (work.completions, work.new_tokens) or not bool(mask.all()):
        raise AssertionError(
            f"{int(mask.sum())} tokens of {tuple(mask.shape)}; needs {work.completions} rows of {work.new_tokens}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
