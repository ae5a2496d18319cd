"""Job: from a model directory and conversations to a draft, in stages that each continue where they stopped.

OUT/answers.jsonl     what the target says itself                 (draft/answers.py)
OUT/started/          the untrained draft, its vocabulary chosen  (never chosen again)
OUT/features/         the target's hidden states                  (draft/store.py)
OUT/checkpoints/      of training                                 (draft/train.py)
OUT/draft/            the draft
OUT/measured.json     real verification on held-out conversations (draft_eval.py)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field
from rich.console import Console

from nonet.chat import Tokenizer
from nonet.config import Config, build, merge, read
from nonet.convert.gguf_eagle3 import export_eagle3
from nonet.draft import data as conversations
from nonet.draft import files, prompts
from nonet.draft.answers import Answer, AnswersConfig, summary, write_answers
from nonet.draft.config import DraftConfig, Fingerprint
from nonet.draft.data import Conversation
from nonet.draft.export import export
from nonet.draft.lint import lint, table
from nonet.draft.model import Draft
from nonet.draft.store import FeatureStore, Kind, bytes_of, capture, trainable
from nonet.draft.train import TrainConfig, Training
from nonet.draft.windows import Windows
from nonet.engine import Engine
from nonet.model import Model, hf
from nonet.pipeline.draft_eval import EvalConfig, evaluate
from nonet.pipeline.draft_start import FormTable, untrained, words_of
from nonet.run import Run
from nonet.types import UserError

STAGE = "draft"


class DataTable(Config):
    train: tuple[str, ...] = ()  # files, or NAME:COUNT of what packages hold (draft/prompts.py)
    heldout: tuple[str, ...] = ()  # none: `share` of the files in train
    share: float = Field(default=0.05, gt=0, lt=1)


class DraftTable(FormTable):
    target: str
    features: Kind = "bf16"  # how they are stored
    window: int = Field(default=512, ge=8)  # longest document in a batch
    batch_tokens: int = Field(default=2048, ge=16)  # of one micro-batch
    micro_batches: int = Field(default=1, ge=1)
    heldout_rows: int = Field(default=64, ge=1)  # held-out conversations answered, to measure on while training
    decode: str = "bf16"  # weights that answers are written with (model/native_weights.py)
    bf16: bool = True  # capture with matrix products in bfloat16
    threads: int = Field(default=0, ge=0)  # 0: as torch finds them
    seed: int = 0


class DraftRecipe(Config):
    draft: DraftTable
    data: DataTable = Field(default_factory=DataTable)
    answers: AnswersConfig = Field(default_factory=AnswersConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)


@dataclass(frozen=True)
class Job:
    recipe: DraftRecipe
    out: Path

    @staticmethod
    def of(
        source: Path, data: Sequence[str], heldout: Sequence[str], out: Path | None, overrides: Sequence[str]
    ) -> Job:
        """source: a recipe, or a model directory under the defaults. data, heldout: in place of the recipe's."""
        recipe = source.suffix == ".toml"
        values: dict[str, Any] = {} if recipe else {"draft": {"target": str(source)}}
        given = {"data": {**({"train": data} if data else {}), **({"heldout": heldout} if heldout else {})}}
        values = merge(merge(values, read([source] if recipe else [], overrides)), given)
        made = build(DraftRecipe, values)
        if not made.data.train:
            raise UserError("data: none given; use --data FILE.jsonl, or --data gym:500 --data chat:500 to begin with")
        return Job(made, out or Path("runs") / f"draft-{source.stem}")

    # ------------------------------------------------------------------ stages

    def settle(self) -> None:
        """The run directory is of these settings, and the target is there."""
        hf.read_config(self.recipe.draft.target)
        self.lab.path.mkdir(parents=True, exist_ok=True)

    def answer(self) -> list[Answer]:
        self.settle()
        config = self.recipe.answers
        engine = Engine(self.target, config.batch, weights=self.recipe.draft.decode)
        file = self.out / "answers.jsonl"
        with self._timed("answers"):
            found = write_answers(engine, self.tokenizer, self.wanted, file, config, self.fingerprint)
        told = summary(found)
        stops = ", ".join(f"{share:.0%} {stop}" for stop, share in told["stops"].items() if share)
        say(
            f"answers: {told['conversations']} conversations, {told['turns']} of {told['turns_asked']} turns, "
            f"{told['tokens']:,} tokens; ended by: {stops}; looping ones are not trained on"
        )
        return found

    def train(self) -> Draft:
        self.settle()
        if (self.out / "draft" / "config.json").exists():
            return files.load(self.out / "draft", self.target, self.vocabulary_hash)
        answers = self.answer()
        draft = self._start(answers)
        r = self.recipe
        learnt = self._captured(draft, trainable(answers, False), "train")
        held = self._captured(draft, trainable(answers, True), "heldout")
        windows = Windows.of(learnt, r.draft.window, r.draft.batch_tokens, r.draft.seed)
        for note in windows.notes:
            say(f"features: {note}")
        n = r.draft.micro_batches
        measured = list(Windows.of(held, r.draft.window, r.draft.batch_tokens).in_order())
        training = Training(
            draft, lambda step: [windows.batch(step * n + i) for i in range(n)], measured, r.train, self.lab, STAGE
        )
        say(f"training: {windows.per_epoch / n:.0f} steps are one pass over {len(windows.pieces)} documents")
        with self._timed("training"):
            kept = training.fit()
        say(f"training: held-out acceptance length {kept.length:.2f} of {r.train.unroll + 1} (bonus token included)")
        files.save(draft, self.out / "draft")
        return draft

    def measure(self) -> dict[str, Any]:
        draft = files.load(self.out / "draft", self.target, self.vocabulary_hash)
        held = [c for c in self.conversations if c.heldout]
        with self._timed("measurement"):
            return evaluate(draft, self.tokenizer, held, self.recipe.eval, self.out)

    # ------------------------------------------------------------------ pieces

    @cached_property
    def target(self) -> Model:
        if self.recipe.draft.threads:
            torch.set_num_threads(self.recipe.draft.threads)
        return hf.load(self.recipe.draft.target)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.recipe.draft.target)

    @cached_property
    def vocabulary_hash(self) -> str:
        return files.vocabulary_hash(self.recipe.draft.target)

    @cached_property
    def fingerprint(self) -> str:
        found = Fingerprint.of(hf.read_config(self.recipe.draft.target), self.vocabulary_hash)
        return f"{found.config}/{found.vocabulary}"

    @cached_property
    def lab(self) -> Run:
        return Run(
            self.out, self.recipe.model_dump(mode="json"), lambda old: build(DraftRecipe, old).model_dump(mode="json")
        )

    @cached_property
    def conversations(self) -> list[Conversation]:
        d = self.recipe.data
        files_share = False if d.heldout else d.share
        found = [c for spec in d.train for c in prompts.conversations(spec, files_share)]
        held = [c for spec in d.heldout for c in prompts.conversations(spec, True)]
        kept, repeated = conversations.unique([*held, *found])  # of two alike the held-out one stays
        if repeated:
            say(f"data: {repeated} conversations are repetitions and were left out")
        if not any(c.heldout for c in kept) or all(c.heldout for c in kept):
            side = "held out" if not any(c.heldout for c in kept) else "to train on"
            raise UserError(f"data: no conversation is {side}; give more, or name --heldout")
        return kept

    @property
    def wanted(self) -> list[Conversation]:
        """Those to be answered: all that are learnt from, and heldout_rows of the others, of every domain alike."""
        held = sorted((c for c in self.conversations if c.heldout), key=lambda c: c.id.rpartition("/")[2])
        return [*(c for c in self.conversations if not c.heldout), *held[: self.recipe.draft.heldout_rows]]

    def draft_config(self, words: int | None) -> DraftConfig:
        return self.recipe.draft.config(self.target, self.vocabulary_hash, words, self.recipe.train.unroll)

    def _start(self, answers: Sequence[Answer]) -> Draft:
        """The untrained draft; its vocabulary is chosen once."""
        folder = self.out / "started"
        if not (folder / "config.json").exists():
            d, V = self.recipe.draft, self.target.config.vocab_size
            words = words_of(d, answers, self.tokenizer, V)
            size = V if words.d2t_W is None else len(words.d2t_W)
            say(f"vocabulary: {size:,} of {V:,} tokens cover {words.coverage:.2%} of what the target wrote")
            draft = untrained(d, self.target, self.vocabulary_hash, words, self.recipe.train.unroll, d.seed)
            partial = folder.with_name(".started")
            shutil.rmtree(partial, ignore_errors=True)
            files.save(draft, partial)
            partial.rename(folder)
        return files.load(folder, self.target, self.vocabulary_hash)

    def _captured(self, draft: Draft, rows: Sequence[Any], name: str) -> FeatureStore:
        d = self.recipe.draft
        taps = draft.config.taps
        tokens = sum(len(row.tokens) for row in rows)
        size = bytes_of(tokens, self.target.config.d_model, taps, self.target.config.layers, d.features)
        say(f"features, {name}: {len(rows)} rows, {tokens:,} tokens, {size / 1e6:.0f} MB as {d.features}")
        folder = self.out / "features" / name
        t = self.recipe.train.temperature
        with self._timed("features"):
            return capture(self.target, rows, folder, taps, d.features, self.fingerprint, bf16=d.bf16, temperature=t)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Into events.jsonl goes how long a part took; of a killed one, only the attempt that ended."""
        began = time.time()
        yield
        self.lab.event("took", part=part, seconds=time.time() - began)


def say(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)


# ---------------------------------------------------------------------------------- export


def export_directory(folder: Path, out: Path, target: Path, to: str, tokens: int, project: bool) -> str:
    """Export, then what the engines concerned make of it, as text."""
    model = hf.load(target)
    draft = files.load(folder, model, files.vocabulary_hash(target))
    if to == "gguf":
        with TemporaryDirectory() as name:
            return str(export_eagle3(export(draft, target, Path(name) / "draft", "vllm"), target, out))
    export(draft, target, out, to, tokens, project)
    engines = {"vllm": ["vllm"], "sglang": ["vllm", "sglang"], "speculators": ["vllm"], "mtp": []}[to]
    verdicts = lint(out, model, engines) if engines else []
    wrong = [v for v in verdicts if v.state != "right"]
    if wrong:
        raise UserError(f"{out}: was written, but {table(wrong)}")
    return "\n".join([str(out), table(verdicts)]).strip()
