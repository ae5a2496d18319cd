"""`nonet tasks`: list task sources, or show tasks with their demonstrations."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from nonet import tasks
from nonet.harness import load_spec, render_assistant


def show(spec: str, count: int, effort: str, difficulty: int) -> None:
    console = Console()
    if not spec:
        table = Table(
            "name", "domain", "what it asks", "a prompt", title="task sources (also gym:NAME, FILE.jsonl, pkg:fn)"
        )
        for s in tasks.list_sources(difficulty):
            table.add_row(s.name, s.domain, s.about, s.example)
        console.print(table)
        return
    source, harness = tasks.load(spec, difficulty=difficulty), load_spec("plain")
    for i in range(count):
        task = source.task("train", i, effort)
        console.rule(task.id)
        for message in task.prompt:
            console.print(f"{message.role}: {message.text}", markup=False)
        for path, text in (task.sandbox.files if task.sandbox else {}).items():
            console.print(f"file {path}: {text!r}", markup=False)
        for message in source.demonstrate(task) or []:
            console.print(f"demonstration: {render_assistant(message, harness)}", markup=False, style="green")
        console.print(f"scored by: {', '.join(task.rewards)}")
