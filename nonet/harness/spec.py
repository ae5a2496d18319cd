"""Harness specs as TOML files: the presets shipped in presets/, or a user's own file."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from nonet.types import HarnessSpec, Tool, UserError

_PRESETS = Path(__file__).parent / "presets"


def load_spec(name: str) -> HarnessSpec:
    """A preset by name, or a TOML file by path; keys are HarnessSpec's fields."""
    file = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    if not file.exists():
        known = ", ".join(sorted(p.stem for p in _PRESETS.glob("*.toml")))
        raise UserError(f"harness = {name!r}: no such preset or file; presets are {known}")
    values = tomllib.loads(file.read_text())
    known_keys = [f.name for f in fields(HarnessSpec)]
    for key in values:
        if key not in known_keys:
            near = difflib.get_close_matches(key, known_keys, n=1, cutoff=0.0)[0]
            raise UserError(f"{file.name}: {key}: unknown key; did you mean {near}?")
    return HarnessSpec(**values)


def system_text(spec: HarnessSpec, effort: str, tools: Sequence[Tool]) -> str:
    """The system message under a spec; empty when the spec's template comes out empty."""
    described = ""
    if tools:
        listing = "\n".join(f"- {t.name} {json.dumps(t.parameters)}: {t.description}" for t in tools)
        example = f'{spec.call_open}{{"name": "...", "arguments": {{...}}}}{spec.call_close}'
        described = f"\nYou can use tools. To call one, write {example}\n{listing}"
    level = spec.effort.replace("{effort}", effort) if effort else ""
    return spec.system.replace("{effort}", level).replace("{tools}", described).strip()
