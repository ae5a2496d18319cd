"""`nonet draft`: the verbs of drafts. `nonet draft MODEL` does everything; the others are its steps, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

ALL = "all"


class OneShot(TyperGroup):
    """`nonet draft models/mine ...` is `nonet draft all models/mine ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = [ALL, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(name="draft", cls=OneShot, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def draft() -> None:
    """Train, measure and export a draft: it makes a model faster and changes nothing that it says.

    \b
    nonet draft models/smollm2 --data chats.jsonl
    nonet draft recipes/smollm2-draft.toml
    nonet serve models/smollm2 --draft runs/draft-smollm2/draft
    nonet draft export runs/draft-smollm2/draft out \\
        --target models/smollm2 --to vllm
    nonet draft lint out --target models/smollm2
    """


Source = Annotated[Path, typer.Argument(help="Model directory, or a recipe (.toml) with a [draft] table.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Conversations to train on: a .jsonl of messages or ShareGPT, or human-eval, gym, chat, functions "
        "(NAME:COUNT). Repeatable.",
    ),
]
Held = Annotated[
    list[str] | None,
    typer.Option("--heldout", help="Conversations to measure on, as --data; none: a share of --data. Repeatable."),
]
Out = Annotated[Path | None, typer.Option(help="Run directory; start again with the same one to continue.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override one value: table.key=value. Repeatable.")]
Target = Annotated[Path, typer.Option("--target", help="Directory of the model the draft was made for.")]


def _job(source: Path, data: list[str] | None, heldout: list[str] | None, out: Path | None, set_: list[str] | None):
    from nonet.pipeline.drafting import Job

    return Job.of(source, data or (), heldout or (), out, set_ or ())


@app.command(ALL, hidden=True)
def all_(source: Source, data: Data = None, heldout: Held = None, out: Out = None, set_: Set = None) -> None:
    """Everything, each stage where it stopped: estimate, answers, vocabulary, features, training, measurement, report.

    The draft is OUT/draft, the report OUT/report.html.
    """
    from nonet.pipeline.draft_run import run

    run(_job(source, data, heldout, out, set_))


@app.command()
def answers(source: Source, data: Data = None, heldout: Held = None, out: Out = None, set_: Set = None) -> None:
    """Let the model answer the conversations itself, into OUT/answers.jsonl. Continues where it was stopped.

    A draft must guess what the model would say, so answers that others wrote are replaced, turn by turn.
    """
    _job(source, data, heldout, out, set_).answer()


@app.command()
def train(source: Source, data: Data = None, heldout: Held = None, out: Out = None, set_: Set = None) -> None:
    """Answers, vocabulary, features and training, without the measurement; the draft is OUT/draft."""
    _job(source, data, heldout, out, set_).train()


@app.command("eval")
def eval_(
    draft: Annotated[Path, typer.Argument(help="A draft's directory, or lookup: what was said before, again.")],
    target: Target,
    data: Data = None,
    tokens: Annotated[int, typer.Option(help="Tokens drafted at a time.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of one answer.", min=1)] = 256,
    out: Annotated[Path | None, typer.Option(help="Where report.html and measured.json go.")] = None,
    weights: Annotated[str, typer.Option(help="What decoding reads: float32, bf16, w16a16, int8, mxfp4.")] = "float32",
) -> None:
    """Measure a draft by real verification in the engine: acceptance with intervals, and seconds against none.

    Acceptance length counts every token a verifying step writes, the bonus token included: 1 to tokens + 1.
    """
    from nonet.pipeline.draft_eval import evaluate_directory

    print(evaluate_directory(draft, target, data or (), tokens, max_tokens, out, weights))


@app.command()
def export(
    draft: Annotated[Path, typer.Argument(help="A draft's directory, as nonet draft writes it.")],
    out: Annotated[Path, typer.Argument(help="Directory to create; a file for gguf.")],
    target: Target,
    to: Annotated[str, typer.Option(help="vllm, sglang (the same directory serves both), speculators, gguf, mtp.")],
    tokens: Annotated[int, typer.Option(help="Tokens drafted at a time, where the format says so.", min=1)] = 4,
    project: Annotated[bool, typer.Option("--project", help="mtp: leave a trained fusion out.")] = False,
) -> None:
    """Write a draft for another engine, then read it back as that engine would. Refuses what it could not compute."""
    from nonet.pipeline.drafting import export_directory

    print(export_directory(draft, out, target, to, tokens, project))


@app.command()
def lint(
    folder: Annotated[Path, typer.Argument(help="An EAGLE-3 draft, made here or elsewhere.")],
    target: Target,
    engine: Annotated[
        list[str] | None, typer.Option(help="vllm, sglang, trtllm, llamacpp; none: all. Repeatable.")
    ] = None,
) -> None:
    """Load a directory as each engine would and compare the logits with those its maker meant.

    Exit status 1 if one of them would compute something else without a word, or a named one would not load it.
    """
    from nonet.draft.lint import lint as lint_draft
    from nonet.draft.lint import table

    verdicts = lint_draft(folder, target, engine or ())
    print(table(verdicts))
    if any(v.silent or (engine and v.loud) for v in verdicts):
        raise typer.Exit(1)
