"""From a `--tasks` spec to a source, and the list behind `nonet tasks`.

    general, agents, coding           all kinds of a domain, taking turns
    general.add, coding.compose, ...  one kind
    gym:NAME, gym:NAME?key=value&...  a reasoning-gym dataset (extra: nonet[tasks])
    pkg.module:attribute              your own: a TaskSource, a function returning one, or a list of tasks
    path/to/tasks.jsonl               your own, without code
    A,B,...                           several of the above, taking turns

`difficulty` applies to the first two; the others have settings, or are what they are.

Invariant: loading `nonet.tasks` imports neither torch nor reasoning_gym. Refuses: unknown names, naming the nearest.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from nonet.protocols import TaskSource
from nonet.tasks import agents, coding, general
from nonet.tasks.source import Generated, Mixture
from nonet.types import UserError

BUILT_IN: dict[str, type[Generated]] = {
    source.name: source for source in (*general.SOURCES, *agents.SOURCES, *coding.SOURCES)
}
SEPARATOR = re.compile(r",(?![^\[]*\])")  # commas, but not those inside [...] of a setting
DOMAINS = tuple(dict.fromkeys(source.domain for source in BUILT_IN.values()))


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """One line of `nonet tasks`: a built-in source, what it asks, one prompt."""

    name: str
    domain: str
    about: str
    example: str


def list_sources(difficulty: int = 1) -> list[SourceInfo]:
    """Every built-in source with an example prompt."""
    out: list[SourceInfo] = []
    for name, source in BUILT_IN.items():
        example = source(difficulty=difficulty).task("train", 0).prompt[-1].text
        out.append(SourceInfo(name, source.domain, source.about, example))
    return out


def load(spec: str, seed: int = 0, difficulty: int = 1) -> TaskSource:
    """The task source that `spec` names (see the top of this file).

    >>> load("general.add").task("train", 0).prompt[0].text.startswith("add ")
    True
    """
    sources = [_one(name, seed, difficulty) for name in names(spec)]
    return sources[0] if len(sources) == 1 else Mixture(",".join(names(spec)), sources)


def names(spec: str) -> list[str]:
    """The parts of a spec."""
    found = [part.strip() for part in SEPARATOR.split(spec) if part.strip()]
    if not found:
        raise UserError("--tasks: is empty; try general, agents, coding, gym:NAME, pkg.module:attribute or FILE.jsonl")
    return found


def _one(name: str, seed: int, difficulty: int) -> TaskSource:
    if name in DOMAINS:
        members = [source(seed, difficulty) for source in BUILT_IN.values() if source.domain == name]
        return Mixture(name, members)
    if name in BUILT_IN:
        return BUILT_IN[name](seed, difficulty)
    if name.startswith("gym:"):
        from nonet.tasks.gym import GymSource

        return GymSource.parse(name, seed)
    if name.endswith(".jsonl") or Path(name).is_file():
        from nonet.tasks import jsonl

        return jsonl.read(Path(name))
    if ":" in name:
        from nonet.tasks.own import own_source

        return own_source(name, seed, difficulty)
    known = [*DOMAINS, *BUILT_IN]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise UserError(f"tasks {name!r}: no such source; did you mean {near!r}? `nonet tasks` lists them all")
