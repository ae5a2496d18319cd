"""The report room: run directory -> one `report.html` that opens offline.

Owns the page a person reads after (or during) a run. Invariant: the page is a function of the run directory alone
(no clock, no host name, no network), and it is written whole or not at all. Refuses: a run directory that does not
exist. Everything else that is missing, torn or malformed becomes a sentence on the page.
"""

from __future__ import annotations

from pathlib import Path

from nonet.report.page import render
from nonet.run import write_atomic
from nonet.types import UserError

__all__ = ["write"]


def write(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path; safe to call again at any time while the run goes on."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"run directory {run_dir}: no such directory; give the --out of a run that has started")
    page = run_dir / "report.html"
    write_atomic(page, render(run_dir))
    return page
