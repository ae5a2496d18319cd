"""Recipes: TOML files merged left to right, then `--set room.key=value`, into frozen pydantic models.

Each room owns its model (`model.ModelConfig`, `rl.RLConfig`, ...); this file only merges, overrides and reports
mistakes as one sentence that names the nearest key. There is no global configuration object.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from nonet.types import UserError


class Config(BaseModel):
    """Base of every room's configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


C = TypeVar("C", bound=BaseModel)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; anything else on the right replaces the left."""
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out


def read(files: Iterable[Path | str], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Merge recipe files left to right and apply `room.key=value` overrides (values are TOML, bare words strings)."""
    merged: dict[str, Any] = {}
    for file in map(Path, files):
        if not file.exists():
            raise UserError(f"recipe {file}: no such file")
        try:
            merged = merge(merged, tomllib.loads(file.read_text()))
        except tomllib.TOMLDecodeError as e:
            raise UserError(f"recipe {file}: {e}") from e
    for override in overrides:
        merged = merge(merged, _parse_override(override))
    return merged


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: write it as room.key=value")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    out: Any = value
    for part in reversed(key.strip().split(".")):
        out = {part: out}
    return out


def build(model: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """Validate `values` as `model`; the first mistake becomes one sentence.

    >>> build(RLConfig, {"fractoin": 0.5}, "rl")   # doctest: +SKIP
    UserError: rl.fractoin: unknown key; did you mean rl.fraction?
    """
    try:
        return model.model_validate(values)
    except ValidationError as e:
        raise UserError(_sentence(model, e.errors()[0], where)) from e


def _sentence(model: type[BaseModel], error: Any, where: str) -> str:
    path = [str(p) for p in error["loc"]]
    name = ".".join([where, *path] if where else path)
    if error["type"] != "extra_forbidden":
        return f"{name} = {error['input']!r}: {error['msg']}"
    known = _fields_at(model, path[:-1])
    near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.0)
    parent = name.rpartition(".")[0]
    hint = f"did you mean {parent + '.' if parent else ''}{near[0]}?" if near else "this table takes no keys"
    return f"{name}: unknown key; {hint}"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        kind = model.model_fields[part].annotation if part in model.model_fields else None
        tables = [t for t in (kind, *get_args(kind)) if isinstance(t, type) and issubclass(t, BaseModel)]
        if not tables:
            return []
        model = tables[0]
    return list(model.model_fields)
