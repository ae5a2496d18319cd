"""A recipe: one table per room. `nonet check` prints it resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from nonet.config import Config, build, merge, read
from nonet.draft.config import eagle3_config
from nonet.draft.train import TrainConfig
from nonet.lm.pretrain import PretrainConfig
from nonet.lm.trainer import LMConfig
from nonet.model import hf
from nonet.model.config import ModelConfig
from nonet.pipeline.draft_start import FormTable
from nonet.rl.config import RLConfig
from nonet.rl.distill import DistillConfig
from nonet.rl.effort import EffortConfig
from nonet.tasks import catalog
from nonet.types import EFFORTS, UserError

SERVING = ("fastapi", "uvicorn", "prometheus_client", "httpx2")  # by `nonet serve` and its client


class RunTable(Config):
    seed: int = 0
    threads: int = Field(default=0, ge=0)  # torch threads; 0: as torch finds them


class StartTable(Config):
    model: str = ""  # a model directory to start from; empty: train a tokenizer and build [model] from scratch
    vocab_size: int = Field(default=512, ge=270)  # of the tokenizer that is trained when `model` is empty
    tokenizer_rows: int = Field(default=3000, ge=100)  # demonstrations the tokenizer learns its merges from


class TasksTable(Config):
    """sources: task spec by domain."""

    sources: dict[str, str] = Field(default_factory=lambda: {d: d for d in ("general", "agents", "coding")})
    difficulty: int = Field(default=1, ge=1)
    efforts: tuple[str, ...] = ("max",)
    harness: str = "terse"
    reward: str = ""  # score every task with this instead of its own rewards: a built-in name or "pkg.module:function"

    @field_validator("efforts")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for effort in value:
            if effort not in EFFORTS:
                raise ValueError(f"{effort!r} is not an effort; use {', '.join(EFFORTS)}")
        return value


class ExpertsTable(Config):
    """One expert for each domain and effort, then one student of them all ([distill]), in place of one RL run over
    everything. Those of the first of tasks.efforts start from the cold start, the others from their domain's first.
    """

    lanes: int = Field(default=2, ge=1)  # trained side by side, one thread each
    later: dict[str, Any] = Field(default_factory=dict)  # what differs from [rl] for the efforts after the first
    student: dict[str, Any] = Field(default_factory=dict)  # what differs from [rl] while the student is taught


class OwnDraftTable(FormTable):
    """After RL, the policy's own MTP layer, or a copy of its last one, becomes a draft, trained on answers that the
    policy samples.
    """

    prompts: int = Field(default=0, ge=0)  # training tasks of each domain that it learns from; 0: no draft
    chosen_by: int = Field(default=16, ge=1)  # further ones of each domain, by which the best draft is chosen
    measured: int = Field(default=100, ge=2)  # held-out tasks of each domain and mode it is verified on
    tokens: int = Field(default=7, ge=1)  # drafted at a time there
    window: int = Field(default=512, ge=8)  # longest document in a batch
    batch_tokens: int = Field(default=2048, ge=16)
    train: TrainConfig = Field(default_factory=TrainConfig)


class ServeTable(Config):
    """After the draft, the policy is served and held-out tasks are played over HTTP."""

    prompts: int = Field(default=0, ge=0)  # held-out tasks of each cell and mode; 0: nothing is served
    clients: int = Field(default=1, ge=1)  # tasks at the same time
    tokens: int = Field(default=4, ge=1)  # drafted at a time

    def require_packages(self) -> None:
        """UserError where it is wanted and cannot be."""
        if self.prompts and any(find_spec(name) is None for name in SERVING):
            raise UserError(
                f"serve.prompts = {self.prompts}: needs pip install 'nonet[serve,teachers]', or serve.prompts = 0"
            )


class EvalTable(Config):
    prompts: int = Field(default=1000, ge=2)  # held-out prompts per domain and mode


class DataTable(Config):
    """What [pretrain] reads."""

    sources: tuple[str, ...] = ()  # files, directories, globs (lm/text.py), or "stdlib"
    heldout: float = Field(default=0.01, gt=0, lt=1)  # share of documents, chosen by the hash of their text
    tokenizer: str = ""  # a directory; empty: start.model's, or one of start.vocab_size trained on the data
    tokenizer_mb: float = Field(default=50.0, gt=0)  # megabytes of text a tokenizer learns its merges from
    cache: str = ""  # where tokenised corpora are kept; empty: in the run directory


class AdviceTable(Config):
    """What `nonet check` sizes a pretraining for."""

    hours: float = Field(default=1.0, gt=0)
    probe_s: float = Field(default=5.0, gt=0)


class Recipe(Config):
    run: RunTable = Field(default_factory=RunTable)
    start: StartTable = Field(default_factory=StartTable)
    model: dict[str, Any] = Field(default_factory=dict)
    tasks: TasksTable = Field(default_factory=TasksTable)
    cold: LMConfig | None = None  # absent: no cold start
    rl: RLConfig = Field(default_factory=RLConfig)
    experts: ExpertsTable | None = None  # absent: one RL run over all domains and efforts
    effort: EffortConfig | None = None  # absent: writing costs nothing
    distill: DistillConfig = Field(default_factory=DistillConfig)
    eval: EvalTable = Field(default_factory=EvalTable)
    draft: OwnDraftTable = Field(default_factory=OwnDraftTable)
    serve: ServeTable = Field(default_factory=ServeTable)
    data: DataTable = Field(default_factory=DataTable)
    pretrain: PretrainConfig | None = None  # a recipe with this table is for `nonet pretrain`
    advice: AdviceTable = Field(default_factory=AdviceTable)

    @property
    def limits(self) -> EffortConfig | None:
        """[effort], where it limits any cell of this recipe."""
        t, effort = self.tasks, self.effort
        if effort is None or not any(effort.ends(domain, level) for domain in t.sources for level in t.efforts):
            return None
        return effort

    def rl_with(self, changes: Mapping[str, Any], where: str) -> RLConfig:
        """[rl] with some of its values replaced."""
        return build(RLConfig, merge(self.rl.model_dump(), changes), where)

    def model_config_for(self, vocab_size: int) -> ModelConfig:
        if "vocab_size" in self.model:
            raise UserError("model.vocab_size: is the tokenizer's; set start.vocab_size")
        return build(ModelConfig, {**self.model, "vocab_size": vocab_size}, "model")


def load_recipe(files: Sequence[Path | str], overrides: Sequence[str] = (), quick: bool = False) -> Recipe:
    """Merge files left to right, then --quick's overlay (NAME.quick.toml beside the last file), then --set."""
    paths = [Path(f) for f in files]
    if quick:
        overlay = paths[-1].with_suffix(".quick.toml")
        if not overlay.exists():
            raise UserError(f"--quick: {overlay} does not exist; a recipe's quick profile lies beside it")
        paths.append(overlay)
    return checked(build(Recipe, read(paths, overrides)))


def checked(recipe: Recipe) -> Recipe:
    """The recipe, if its model can be built, and a draft of it and a server where they are wanted."""
    recipe.serve.require_packages()
    start, wanted = recipe.start, recipe.draft.prompts
    if not start.model:
        config = recipe.model_config_for(start.vocab_size)
    else:
        config = hf.read_config(start.model) if wanted else None
    if wanted and config is not None:
        form = recipe.draft.form_for(config)
        if form == "mtp" and not config.mtp_layers:
            raise UserError(
                f"draft.form = mtp, draft.prompts = {wanted}: the model has no MTP layer to make a draft of; "
                "set model.mtp_layers = 1, draft.form = eagle3, or draft.prompts = 0"
            )
        if form == "eagle3":
            eagle3_config(config, taps=recipe.draft.taps or None)
    return recipe


def by_domain(spec: str) -> dict[str, str]:
    """A task spec taken apart by what its parts say of themselves: what `tasks.sources` is."""
    out: dict[str, list[str]] = {}
    for name in catalog.names(spec):
        out.setdefault(catalog.load(name).domain, []).append(name)
    return {domain: ",".join(names) for domain, names in out.items()}


def single_job(
    model: Path, tasks: str, reward: str, harness: str, sft_steps: int, eval_prompts: int, overrides: Sequence[str]
) -> Recipe:
    """The recipe behind `nonet rl` and `nonet sft`: one model directory, one task spec, defaults for a real model."""
    values: dict[str, Any] = {
        "start": {"model": str(model)},
        "tasks": {"sources": by_domain(tasks), "reward": reward, "harness": harness},
        "rl": {"groups": 8, "samples": 8, "max_batch": 64, "lr": 1e-5, "micro_tokens": 2048, "save_every_s": 120.0},
        "eval": {"prompts": eval_prompts},
    }
    if sft_steps:
        values["cold"] = {"steps": sft_steps, "batch": 8, "lr": 5e-5, "betas": (0.9, 0.95), "save_every_s": 120.0}
    return build(Recipe, merge(values, read([], overrides)))
