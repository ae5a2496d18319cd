"""TRL's side of `nonet bench rl_step`: GRPOTrainer in its own venv, one training step per "go".

Blocks at the end of each step, so a step is a whole cycle of the trainer. Set for speed where TRL's defaults would
cost it time here: no gradient checkpointing, no bf16 (both sides compute in fp32), no logging, no saving.
"""

from __future__ import annotations

import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nonet.bench.turns import Turns
from nonet.bench.workload import Workload, hash_reward, read_prompts


def main(folder: Path) -> None:
    turns = Turns()
    work = Workload.read(folder)
    torch.set_num_threads(work.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = read_prompts(folder)
    for p in prompts:
        if (found := tokenizer(p.text).input_ids) != p.ids:
            raise AssertionError(f"prompt {p.text!r}: ids {found} here, {p.ids} there")

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        if lengths != [work.new_tokens] * work.completions:
            raise AssertionError(f"completions of {lengths} tokens; needs {work.completions} of {work.new_tokens}")
        return [hash_reward(text, work.seed) for text in completions]

    trainer = TimedTrainer(
        model=str(folder / "model"),
        args=config(work, folder),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": p.text} for p in prompts]),
        processing_class=tokenizer,
    )
    trainer.add_callback(Gate(turns, trainer))
    trainer.train()
    turns.done()


def config(work: Workload, folder: Path) -> GRPOConfig:
    return GRPOConfig(
        **shared(work, folder),
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        loss_type="dapo",
        beta=0.0,
    )


def shared(work: Workload, folder: Path) -> dict[str, Any]:
    """What all of TRL's trainers are given."""
    return dict(
        output_dir=str(folder / "trl"),
        max_steps=1_000_000,
        per_device_train_batch_size=work.completions,
        temperature=1.0,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        seed=work.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long generation and scoring took within a step."""

    generation_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        out = super()._generate_and_score_completions(inputs)
        self.generation_s = time.perf_counter() - began
        return out


class Gate(TrainerCallback):
    """Lets the trainer take one step per "go"."""

    def __init__(self, turns: Turns, trainer: TimedTrainer):
        self.turns, self.trainer = turns, trainer
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            names = ("trl", "torch", "transformers", "accelerate")
            self.turns.ready(
                threads=torch.get_num_threads(),
                parameters=sum(p.numel() for p in model.parameters()),
                versions={name: metadata.version(name) for name in names},
            )
            self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds, generation = time.perf_counter() - self.began, self.trainer.generation_s
        self.turns.step(generation_s=generation, update_s=seconds - generation)
        self._wait(control)

    def _wait(self, control: Any) -> None:
        control.should_training_stop = not self.turns.wait()
        self.began = time.perf_counter()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
