"""`pkg.module:attribute`: how a user's own Python reaches Nonet.

Invariant: what fails inside the user's module is shown as it is; what is wrong with the name is one sentence.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import Any

from nonet.types import UserError


def load(spec: str, what: str) -> Any:
    """Import `pkg.module` (the working directory counts as importable) and return its attribute.

    `what` names the setting in errors, such as "--tasks".
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{what} {spec!r}: write it as pkg.module:attribute")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise  # a module that the user's module wanted
        raise UserError(f"{what} {spec!r}: no module {e.name!r} on the path or in {here}") from e
    try:
        out = module
        for part in attribute.split("."):
            out = getattr(out, part)
    except AttributeError as e:
        near = difflib.get_close_matches(attribute, [n for n in dir(module) if not n.startswith("_")], n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{what} {spec!r}: {module_name} has no {attribute!r}{hint}") from e
    return out
