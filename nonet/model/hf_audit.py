"""Whether a directory holds exactly the tensors its config describes; if not, one sentence that names all others.

Names that differ only in layer, expert or part of an expert are folded into one, so that a lost shard of a thousand
experts stays readable: model.layers.{4-7}.block_sparse_moe.experts.{0-895}.{w1,w2,w3}.weight_packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nonet.model.config import ModelConfig
from nonet.model.hf_files import Entry
from nonet.model.hf_names import Place, places
from nonet.types import UserError

VISION = ("vision_tower.", "mm_projector.")  # what K3's tensors of its vision tower begin with
# What names may differ in, each as (before, it, after); folded in this order.
_FOLDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(.+\.experts\.)(\d+)(\..+)",
        r"(.+\.experts\.[^.]+\.)(w[123])(\..+)",
        r"(.+\.experts\.[^.]+\.[^.]+\.)(weight_packed|weight_scale)()",
        r"(model\.layers\.)(\d+)(\..+)",
        r"(model\.layers\.[^.]+\.)(.+)()",
    )
)

Pairs = Iterable[tuple[str, str]]  # (tensor, what is said about it)


def audit(found: Mapping[str, Entry], config: ModelConfig, where: Path | str) -> None:
    """Refuse a set of tensors, by bare name, that is not exactly what the config describes."""
    compare(found, places(config), where)


def compare(found: Mapping[str, Entry], wanted: Mapping[str, Place], where: Path | str, prefix: str = "") -> None:
    """`audit` against places already made. prefix: what the directory puts before bare names, for the sentence."""
    missing = ((name, "") for name in wanted if name not in found)
    foreign = {name: e.file.name for name, e in found.items() if name not in wanted}
    vision = [name for name in foreign if name.startswith(VISION)]
    surplus = ((name, file) for name, file in foreign.items() if name not in vision)
    wrong = (
        (name, f"has shape {list(e.shape)} in {e.file.name}, needs {list(wanted[name].shape)}")
        for name, e in found.items()
        if name in wanted and not wanted[name].accepts(e.shape)
    )
    problems = [
        *(f"lacks {prefix}{name}" for name, _ in fold(missing)),
        *(f"has surplus {prefix}{name} in {file}" for name, file in fold(surplus)),
        *(f"{prefix}{name} {what}" for name, what in fold(wrong)),
        *_vision(vision, foreign),
    ]
    if problems:
        fix = "remove these tensors" if vision and len(problems) == 1 else "correct config.json or replace the weights"
        raise UserError(f"{where}: {'; '.join(problems)}: {fix}")


def _vision(names: list[str], files: Mapping[str, str]) -> list[str]:
    """One problem for the whole tower: it is complete and sound, but only the text model is implemented."""
    if not names:
        return []
    parts = [f"{sum(n.startswith(p) for n in names)} under {p}*" for p in VISION if any(n.startswith(p) for n in names)]
    held = ", ".join(sorted({files[name] for name in names}))
    return [f"has surplus vision tensors ({', '.join(parts)}, in {held}), but only the text model is implemented"]


def fold(pairs: Pairs) -> list[tuple[str, str]]:
    """The names as they came, with those that differ in one respect and are said the same about as one.

    >>> fold([("model.layers.0.mlp.up_proj.weight", "x"), ("model.layers.1.mlp.up_proj.weight", "x")])
    [('model.layers.{0-1}.mlp.up_proj.weight', 'x')]
    """
    for pattern in _FOLDS:
        pairs = _folded(pairs, pattern)
    return list(pairs)


def _folded(pairs: Pairs, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, detail in pairs:
        match = pattern.fullmatch(name)
        key = (match[1], match[3], detail) if match else (name, "", detail)
        groups.setdefault(key, []).append(match[2] if match else "")
    return [(f"{head}{_joined(items)}{tail}", detail) for (head, tail, detail), items in groups.items()]


def _joined(items: list[str]) -> str:
    """One item as it is, several in braces, numbers as ranges.

    >>> _joined(["7"]), _joined(["0", "1", "2", "9"]), _joined(["w1", "w3"])
    ('7', '{0-2,9}', '{w1,w3}')
    """
    if len(items) == 1:
        return items[0]
    if not all(item.isdigit() for item in items):
        return f"{{{','.join(items)}}}"
    spans: list[list[int]] = []
    for i in sorted(map(int, items)):
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return f"{{{','.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)}}}"
