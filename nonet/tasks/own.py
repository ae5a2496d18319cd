"""A user's own source by `pkg.module:attribute`: a TaskSource, something that makes one, or a list of tasks.

Invariant: whatever the attribute is, what comes back has a TaskSource's name, domain, task and demonstrate.
Refuses: anything else, saying what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

from nonet.protocols import TaskSource
from nonet.tasks import attribute
from nonet.tasks.fixed import FixedSource, entry_of
from nonet.types import UserError

PARTS = ("name", "domain", "task", "demonstrate")


def own_source(spec: str, seed: int, difficulty: int) -> TaskSource:
    """Import `spec`; a callable is called, with `seed` and `difficulty` if it takes them."""
    found = attribute.load(spec, "--tasks")
    if callable(found) and not _is_source(found):
        found = found(**_accepted(found, {"seed": seed, "difficulty": difficulty}))
    if _is_source(found):
        return cast(TaskSource, found)
    if isinstance(found, Iterable) and not isinstance(found, str | bytes | dict):
        entries = [entry_of(item, f"{spec}[{i}]", str(i)) for i, item in enumerate(found)]
        return FixedSource(spec.rpartition(":")[2], entries)
    missing = ", ".join(part for part in PARTS if not hasattr(found, part))
    raise UserError(
        f"--tasks {spec!r}: gives a {type(found).__name__}, which is neither a list of tasks nor a TaskSource "
        f"(it has no {missing})"
    )


def _is_source(found: Any) -> bool:
    return not inspect.isclass(found) and all(hasattr(found, part) for part in PARTS)


def _accepted(function: Any, offered: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {key: value for key, value in offered.items() if key in parameters}
