"""`nonet pretrain`: tokenizer, corpus, training in stages, report. Each stage is skipped when done, resumed when not.

models/start                 the tokenizer
corpus/HASH                  tokenised text, unless data.cache says where
models/stage-N-context-C     weights after each stage of more than one
models/pretrain              the result, a Hugging Face directory with its tokenizer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from nonet.config import build, merge, read
from nonet.lm import corpus as lm_corpus
from nonet.lm import text, vocabulary
from nonet.lm.held_out import HeldOut
from nonet.lm.pretrain import Pretraining
from nonet.model import Model, hf
from nonet.pipeline.context import Context
from nonet.pipeline.recipe import Recipe, checked, load_recipe
from nonet.pipeline.runner import run_stages
from nonet.pipeline.stages import start_model, write_report
from nonet.run import Run
from nonet.types import UserError

# What `nonet pretrain --data ...` trains without a recipe: the model of recipes/nano.toml with a larger vocabulary.
DEFAULT: dict[str, Any] = {
    "start": {"vocab_size": 2048},
    "model": {"d_model": 128, "layers": 4, "heads": 4, "d_ff": 320, "mtp_layers": 1},
    "pretrain": {},
}


def pretrain_recipe(files: Sequence[str], data: Sequence[str], quick: bool, overrides: Sequence[str]) -> Recipe:
    """The recipe of the command line: files (or the default), with `data` in place of its sources."""
    for file in files if data else ():
        if not file.endswith(".toml"):
            raise UserError(f"{file}: is not a recipe (.toml); quote a glob, or write --data before every file")
    if files:
        recipe = load_recipe(files, overrides, quick)
    else:
        if quick:
            raise UserError("--quick: belongs to a recipe; name one, or leave it out")
        recipe = checked(build(Recipe, merge(DEFAULT, read([], overrides))))
    if recipe.pretrain is None:
        raise UserError(f"recipe {files[-1]}: has no [pretrain] table; add one, or use nonet run")
    if data:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": tuple(data)})})
    if not recipe.data.sources:
        raise UserError("data.sources: is empty; set it in the recipe, or give --data FILE, DIRECTORY, GLOB or stdlib")
    return recipe


def run_pretrain(recipe: Recipe, out: Path) -> None:
    run = run_stages(recipe, out, STAGES)
    print_result(run)


def train_tokenizer(sources: Sequence[str], vocab_size: int, out: Path, megabytes: float) -> str:
    """`nonet tokenizer train`: returns a sentence about what was made."""
    if not sources:
        raise UserError("--data: give at least one FILE, DIRECTORY, GLOB or stdlib")
    made = vocabulary.train(training_texts(sources, 0.0, int(megabytes * 1e6)), vocab_size, out)
    read_bytes = tokens = 0
    for document in training_texts(sources, 0.0, 1_000_000):
        read_bytes += len(document.encode("utf-8", "surrogatepass"))
        tokens += len(made.encode_literal(document))
    if not tokens:
        raise UserError(f"data {', '.join(sources)}: holds no text; give files with documents in them")
    return f"{out}: {made.vocab_size} ids, {read_bytes / tokens:.2f} bytes a token on the first {read_bytes:,} bytes"


# --------------------------------------------------------------------------------- stages


def tokenizer(c: Context) -> None:
    given = c.recipe.data.tokenizer or c.recipe.start.model
    start = c.models("start")
    if given:
        start.mkdir(parents=True, exist_ok=True)
        hf.copy_tokenizer(given, start)
    else:
        data = c.recipe.data
        texts = training_texts(data.sources, data.heldout, int(data.tokenizer_mb * 1e6))
        vocabulary.train(texts, c.recipe.start.vocab_size, start)


def training_texts(sources: Sequence[str], heldout: float, budget: int) -> Iterator[str]:
    """Documents that are not held out, until `budget` bytes."""
    for file in text.files(sources):
        for document in text.documents(file):
            if lm_corpus.is_heldout(np.array([lm_corpus.text_hash(document)], np.uint64), heldout)[0]:
                continue
            yield document
            budget -= len(document.encode("utf-8", "surrogatepass"))
            if budget <= 0:
                return


def corpus(c: Context) -> lm_corpus.Corpus:
    data = c.recipe.data
    cache = Path(data.cache) if data.cache else c.run.path / "corpus"
    found = lm_corpus.build(data.sources, c.tokenizer, cache)
    training, held = found.divided(data.heldout)
    if not len(held) or not len(training):
        raise UserError(
            f"data.heldout = {data.heldout}: holds out {len(held)} of {len(found.documents_M)} documents; "
            "change it, or give more documents (a .txt file is one document, a .jsonl line is one)"
        )
    return found


def make_corpus(c: Context) -> None:
    found = corpus(c)
    training, held = found.divided(c.recipe.data.heldout)
    figures = {"documents": len(training), "tokens": int(found.lengths_M[training].sum())}
    figures |= {"heldout_documents": len(held), "heldout_tokens": int(found.lengths_M[held].sum())}
    figures["bytes"] = int(found.documents_M["bytes"].sum())
    c.run.event("corpus", name=found.folder.name, **figures)


def pretrain(c: Context) -> None:
    config = c.recipe.pretrain
    assert config is not None
    found, model = corpus(c), start_model(c)
    if c.tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"data.tokenizer = {c.recipe.data.tokenizer}: has {c.tokenizer.vocab_size} ids, the model in "
            f"start.model only {model.config.vocab_size}; use the model's own tokenizer"
        )
    training, held = found.divided(c.recipe.data.heldout)
    held_out = HeldOut(found, held, torch.tensor(vocabulary.bytes_of_tokens(c.tokenizer)))

    def ended(name: str) -> None:
        if len(config.stages) > 1:
            _keep(c, model, f"stage-{name}")

    Pretraining(model, found, training, held_out, config, c.run, c.recipe.run.seed, ended).fit()
    _keep(c, model, "pretrain")


def _keep(c: Context, model: Model, name: str) -> None:
    hf.save(model, c.models(name))
    hf.copy_tokenizer(c.models("start"), c.models(name))


STAGES = (
    ("tokenizer", tokenizer),
    ("corpus", make_corpus),
    ("pretrain", pretrain),
    ("report", write_report),
)


# --------------------------------------------------------------------------------- the end


def print_result(run: Run) -> None:
    """Held-out bits per byte before and after each stage."""
    table = Table(title="held-out bits per byte")
    for column in ("stage", "context", "before", "after", "bytes measured"):
        table.add_column(column)
    ends: dict[str, dict[str, Any]] = {}
    for e in run.events("bpb"):
        ends.setdefault(e["stage"], {})[e["when"]] = e
    for stage, e in ends.items():
        if {"before", "after"} <= e.keys():
            figures = [f"{e[when]['bpb']:.4f}" for when in ("before", "after")]
            table.add_row(stage, str(e["after"]["context"]), *figures, f"{e['after']['bytes']:,}")
    console = Console(width=120)
    console.print(table)
    console.print(f"model: {run.path / 'models' / 'pretrain'}", soft_wrap=True)
