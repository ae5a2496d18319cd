"""A drafter by the name a user gives: `lookup`, or a draft's directory."""

from __future__ import annotations

from pathlib import Path

from nonet.draft.files import load, vocabulary_hash
from nonet.draft.native import drafter_of
from nonet.engine.drafter import Drafter
from nonet.engine.lookup import PromptLookup
from nonet.model import Model
from nonet.types import UserError

LOOKUP = "lookup"


def open_drafter(source: str, model: Model, directory: Path, steps: int) -> Drafter:
    """source: `lookup`, or the directory of a draft of this model, which was loaded from `directory`. UserError where
    there is no such draft, or it is another model's.
    """
    if source == LOOKUP:
        return PromptLookup(steps)
    if not Path(source).is_dir():
        raise UserError(f"draft = {source}: no such directory; give a draft's directory, or {LOOKUP}")
    return drafter_of(load(source, model, vocabulary_hash(directory)), steps)
