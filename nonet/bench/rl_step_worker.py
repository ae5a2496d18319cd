"""Our side of `rl_step`, a process of its own: `Loop.iterate()` as `nonet run` calls it, one iteration per "go".

Rollout through Episode and Engine with fraction 1, reward, pack, learner, engine.load, events.jsonl. Makes the model
directory that both sides load, since the controller stays free of torch (its size would count as the workers').
"""

from __future__ import annotations

import json
import sys
from functools import cached_property
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from nonet.bench.turns import Turns
from nonet.bench.workload import Prompt, Workload, hash_reward, questions, read_prompts, write_prompts
from nonet.chat import Tokenizer
from nonet.model import Model, ModelConfig, Rope, hf
from nonet.model.init import initialise
from nonet.protocols import Reward
from nonet.rl import Loop, RLConfig
from nonet.rl.setting import Setting, Split
from nonet.run import Run
from nonet.types import HarnessSpec, Message, Task

PAD, END, ASSISTANT = "<|pad|>", "<|end|>", "<|assistant|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(folder: Path) -> None:
    turns = Turns()
    work = Workload.read(folder)
    torch.set_num_threads(work.threads)
    prepare(work, folder)
    loop = open_loop(work, folder)
    turns.ready(threads=torch.get_num_threads(), parameters=loop.learner.model.parameter_count())
    while turns.wait():
        metrics = loop.iterate()
        check(metrics["tokens"], metrics["trained_tokens"], work)
        turns.step(generation_s=metrics["rollout_s"], update_s=metrics["update_s"])
    turns.done()


def check(sampled: int, trained: int, work: Workload) -> None:
    """Both sides must have done the stated work, or the comparison is void."""
    if not sampled == trained == work.completions * work.new_tokens:
        raise AssertionError(f"{sampled} tokens sampled, {trained} trained; needs {work.completions * work.new_tokens}")


def open_loop(work: Workload, folder: Path) -> Loop:
    model = hf.load(folder / "model")
    reward: Reward = lambda task, transcript, sandbox: hash_reward(transcript[-1].text, work.seed)  # noqa: E731
    setting = Setting(
        questions_of(folder), HarnessSpec("bench"), Endless(folder / "model"), {"hash": reward}, seed=work.seed
    )
    loop = Loop(model, setting, loop_config(work), Run(folder / "run"), work.seed)
    loop.park.start()  # as `fit` does in a new run
    return loop


def loop_config(work: Workload) -> RLConfig:
    return RLConfig(
        steps=1_000_000,
        groups=work.prompts,
        samples=work.samples,
        fraction=1.0,
        max_tokens=work.new_tokens,
        lr=work.lr,
        optimizer="adamw",
        warmup=0,
        minibatches=1,
        keep_groups=0,  # TRL writes no trajectories either
    )


def questions_of(folder: Path) -> Questions:
    return Questions([p.question for p in read_prompts(folder)])


class Questions:
    """A TaskSource over a list, taken in turn."""

    name, domain = "bench.questions", "general"

    def __init__(self, questions: list[str]):
        self.questions = questions

    def task(self, split: Split, index: int, effort: str = "max") -> Task:
        question = self.questions[index % len(self.questions)]
        return Task(f"{self.name}/{split}/{index}", (Message.user(question),), effort=effort, rewards=("hash",))

    def demonstrate(self, task: Task) -> list[Message] | None:
        return None


class Endless(Tokenizer):
    """Nothing stops a completion but its budget, as with TRL's min_new_tokens."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        return ()


# ------------------------------------------------------------- what both load


def prepare(work: Workload, folder: Path) -> None:
    """folder/model (random weights, byte tokenizer) and folder/prompts.json."""
    out = folder / "model"
    write_model(work, out)
    tokenizer = Tokenizer(out)
    ids = [tokenizer.prompt([{"role": "user", "content": q}]) for q in questions(work.seed)]
    prompts = zip(questions(work.seed), ids, strict=True)
    write_prompts([Prompt(question, tokenizer.decode(i), i) for question, i in prompts], folder)


def write_model(work: Workload, out: Path) -> int:
    """A model directory of random weights; returns how many."""
    out.mkdir(parents=True, exist_ok=True)
    config = ModelConfig(
        vocab_size=write_tokenizer(out),
        d_model=work.hidden,
        layers=work.layers,
        d_ff=work.intermediate,
        mixers=("gqa",) * work.layers,
        heads=work.heads,
        tie_embeddings=False,
        max_position=1024,
        activation="silu",
        rope=Rope(),
    )
    model = initialise(Model(config), work.seed)
    hf.save(model, out)
    return model.parameter_count()


def write_tokenizer(out: Path) -> int:
    """256 bytes and three control tokens, as a Hugging Face directory; returns the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, END, ASSISTANT])
    core.save(str(out / "tokenizer.json"))
    names = {"eos_token": END, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": TEMPLATE}))
    ends = {"eos_token_id": core.token_to_id(END), "pad_token_id": core.token_to_id(PAD)}
    (out / "generation_config.json").write_text(json.dumps(ends))
    return core.get_vocab_size()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
