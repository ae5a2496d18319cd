"""Progress of long work: a bar with an ETA on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 15.0


@contextmanager
def progress(title: str, total: int, start: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Yields update(done, note). `start` is work done by an earlier, interrupted run; it does not count for the ETA."""
    console = Console(file=sys.stderr)
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(title, total=total, completed=start, note="")
            yield lambda done, note="": bar.update(task, completed=done, note=note)
    else:
        yield _lines(title, total, start)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console
    )


def _lines(title: str, total: int, start: int) -> Callable[[int, str], None]:
    began = last = time.time()

    def update(done: int, note: str = "") -> None:
        nonlocal last
        now = time.time()
        if done < total and now - last < _LINE_EVERY_S:
            return
        last = now
        left = (now - began) / max(1, done - start) * (total - done)
        print(f"{title} {done}/{total}  {now - began:.0f} s, {left:.0f} s left  {note}", file=sys.stderr, flush=True)

    return update
