"""Features of a frozen target on disk: computed once, read in every epoch.

    store.json                  settings, and the shards so far: written after each, so that a killed capture goes on
    shard-00000.safetensors     lengths_R, tokens_N, mask_N, lse_N and vectors_NF, the taps side by side with tap L at
                                the end if it is none of them; for fp8 also scales_NK, one for each D values of a row

Rows are the answers' rows (`answers.Row`), read whole by the target, so that a row cut into windows later still has the
features of its full context. Rows lie in order of length; `windows` shuffles.
Invariant: a shard that store.json names is whole. What is stored for a row does not depend on its batch-mates beyond
rounding. Refuses: a disk without room, another target, other taps, rows longer than the target's context.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nonet.draft.answers import Answer, Row
from nonet.model import Model
from nonet.model.taps import Taps, checked_taps
from nonet.ops.overlap_blocks import Head, log_total
from nonet.progress import progress
from nonet.run import write_atomic
from nonet.types import UserError

Kind = Literal["fp8", "bf16", "float32"]
_BYTES: dict[str, int] = {"fp8": 1, "bf16": 2, "float32": 4}
_FP8_MAX = 448.0  # of e4m3
_SHARD_BYTES = 64 << 20
INDEX = "store.json"


@dataclass(frozen=True)
class Stored:
    """One row: tokens_T int64, mask_T bool (the answer's own tokens), features_TF and hidden_TD float32.

    lse_T: logsumexp of the target's logits over the store's temperature where the next token is an answer's, 0
    elsewhere; of hidden_TD as stored.
    """

    tokens_T: Tensor
    mask_T: Tensor
    lse_T: Tensor
    features_TF: Tensor
    hidden_TD: Tensor


def trainable(answers: Sequence[Answer], heldout: bool) -> list[Row]:
    """Rows of one side of the split, looping answers left out."""
    return [row for a in answers if a.heldout == heldout and not a.looping for row in a.rows if row.written]


# ----------------------------------------------------------------------------------------- size


def bytes_of(tokens: int, width: int, taps: Sequence[int], layers: int, kind: Kind) -> int:
    """What a store of so many tokens takes on disk."""
    vectors = len(taps) + (layers not in taps)
    scales = 4 * vectors if kind == "fp8" else 0
    return tokens * (vectors * width * _BYTES[kind] + scales + 9)  # a token's id, mask and logsumexp


def check_room(needed: int, folder: Path) -> None:
    """UserError unless the disk has room for so many bytes, and a tenth more."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed * 1.1 > free:
        raise UserError(
            f"store {folder}: needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB; "
            "use kind = fp8, fewer answers, or another disk"
        )


# ----------------------------------------------------------------------------------------- writing


def capture(
    model: Model,
    rows: Sequence[Row],
    folder: Path,
    taps: Sequence[int],
    kind: Kind,
    target: str,
    batch: int = 4096,
    bf16: bool = False,
    temperature: float = 1.0,
) -> FeatureStore:
    """Run the frozen target over every row and keep what `taps` see; continues where a killed capture stopped.

    batch: tokens of one forward, padding included. bf16: matrix products in bfloat16. target: fingerprint, checked by
    who reads. temperature: of the distributions whose totals are kept, that of the training to come.
    """
    if kind not in get_args(Kind):
        raise UserError(f"kind = {kind!r}: must be one of {', '.join(get_args(Kind))}")
    config = model.config
    taps = checked_taps(taps, config.layers)
    _check_rows(rows, config.max_position)
    ordered = sorted(rows, key=lambda r: len(r.tokens))
    settings = {
        **{"target": target, "taps": list(taps), "layers": config.layers, "width": config.d_model, "kind": kind},
        **{"rows": len(rows), "tokens": sum(len(r.tokens) for r in rows), "content": _digest(ordered), "bf16": bf16},
        "temperature": temperature,
    }
    needed = bytes_of(settings["tokens"], config.d_model, taps, config.layers, kind)
    shards = _started(folder, settings)
    if not shards:
        check_room(needed, folder)
    begin = sum(s["rows"] for s in shards)
    done = sum(len(r.tokens) for r in ordered[:begin])
    per_shard = max(1, _SHARD_BYTES * settings["tokens"] // max(1, needed))
    with progress(f"features: tokens ({needed / 1e6:.0f} MB)", settings["tokens"], done) as bar:
        for part in _grouped(ordered[begin:], per_shard):
            name = f"shard-{len(shards):05d}.safetensors"
            save_file(_shard(model, part, taps, kind, batch, bf16, temperature), folder / f".{name}")
            (folder / f".{name}").rename(folder / name)
            shards.append({"file": name, "rows": len(part)})
            write_atomic(folder / INDEX, json.dumps({**settings, "shards": shards}, indent=1))
            done += sum(len(r.tokens) for r in part)
            bar(done, "")
    return FeatureStore(folder, target, taps)


def _digest(rows: Sequence[Row]) -> str:
    return blake2b(repr([(r.tokens, r.policy) for r in rows]).encode(), digest_size=8).hexdigest()


def _check_rows(rows: Sequence[Row], context: int) -> None:
    if not rows:
        raise UserError("features: no rows; every answer is held out, empty or looping")
    if not any(row.written for row in rows):
        raise UserError("features: no token of these rows was written by the target, so nothing would be learnt")
    longest = max(len(r.tokens) for r in rows)
    if longest > context:
        raise UserError(f"features: a row has {longest} tokens, the target reads {context}; leave it out")


def _started(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The shards that are there already, of a store with these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / INDEX
    if not file.exists():
        write_atomic(file, json.dumps({**settings, "shards": []}, indent=1))
        return []
    found = json.loads(file.read_text())
    shards = found.pop("shards")
    if found != settings:
        changed = ", ".join(f"{k}: {found.get(k)!r} -> {v!r}" for k, v in settings.items() if found.get(k) != v)
        raise UserError(f"store {folder}: was made with other settings ({changed}); name another or delete it")
    return shards


def _grouped(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Runs of rows of at most `tokens` tokens, one row at least."""
    part: list[Row] = []
    for row in rows:
        if part and sum(len(r.tokens) for r in part) + len(row.tokens) > tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _padded_groups(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Rows come in ascending length, so the last of a group is the widest."""
    part: list[Row] = []
    for row in rows:
        if part and (len(part) + 1) * len(row.tokens) > tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


@torch.inference_mode()
def _shard(
    model: Model, rows: Sequence[Row], taps: Sequence[int], kind: Kind, batch: int, bf16: bool, temperature: float
) -> dict[str, Tensor]:
    last, width = model.config.layers, model.config.d_model
    kept = taps if last in taps else (*taps, last)
    vectors: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for group in _padded_groups(rows, batch):
            vectors += _hidden(model, group, kept)
    mask_N = torch.cat([mask_of(r) for r in rows])
    stored = encoded(torch.cat(vectors), width, kind)
    at = kept.index(last) * width
    hidden_ND = decoded(stored["vectors_NF"], stored.get("scales_NK"))[:, at : at + width]
    return {
        "lengths_R": torch.tensor([len(r.tokens) for r in rows]),
        "tokens_N": torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int32),
        "mask_N": mask_N.to(torch.uint8),
        "lse_N": _totals(model, hidden_ND, mask_N, temperature),
        **stored,
    }


def _totals(model: Model, hidden_ND: Tensor, mask_N: Tensor, temperature: float) -> Tensor:
    """Before an answer's tokens the logsumexp of the target's logits, over temperature; elsewhere 0. No row begins with
    an answer.
    """
    weight = model.lm_head.weight
    before = (mask_N.nonzero()[:, 0] - 1).clamp(min=0)
    lse_N = torch.zeros(len(mask_N))
    normed = model.norm(hidden_ND[before].to(weight.dtype))
    lse_N[before] = log_total(Head(normed, weight, temperature)).float()
    return lse_N


def _hidden(model: Model, rows: Sequence[Row], taps: Sequence[int]) -> list[Tensor]:
    """For each row [T, taps * D], without its padding."""
    counts = [len(r.tokens) for r in rows]
    tokens_BT = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for b, row in enumerate(rows):
        tokens_BT[b, : counts[b]] = torch.tensor(row.tokens)
    seen = Taps(taps)
    model(tokens_BT, counts_B=torch.tensor(counts), taps=seen)
    return [features[:n].float() for features, n in zip(seen.features_BTF, counts, strict=True)]


def mask_of(row: Row) -> Tensor:
    """[T] bool: what the target wrote itself."""
    mask_T = torch.zeros(len(row.tokens), dtype=torch.bool)
    for begin, end in row.policy:
        mask_T[begin:end] = True
    return mask_T


# ----------------------------------------------------------------------------------------- numbers on disk


def encoded(vectors_NF: Tensor, width: int, kind: Kind) -> dict[str, Tensor]:
    """As they are stored; fp8: e4m3 times a float32 scale for every `width` values of a row, its largest at 448."""
    if kind != "fp8":
        return {"vectors_NF": vectors_NF.to(torch.bfloat16 if kind == "bf16" else torch.float32)}
    parts_NKD = vectors_NF.unflatten(-1, (-1, width))
    scales_NK = parts_NKD.abs().amax(-1) / _FP8_MAX
    safe_NK1 = torch.where(scales_NK > 0, scales_NK, 1.0).unsqueeze(-1)
    return {"vectors_NF": (parts_NKD / safe_NK1).to(torch.float8_e4m3fn).flatten(1), "scales_NK": scales_NK}


def decoded(vectors_NF: Tensor, scales_NK: Tensor | None) -> Tensor:
    """float32 of what `encoded` stored."""
    if scales_NK is None:
        return vectors_NF.float()
    return (vectors_NF.float().unflatten(-1, (scales_NK.shape[-1], -1)) * scales_NK.unsqueeze(-1)).flatten(-2)


# ----------------------------------------------------------------------------------------- reading


class FeatureStore:
    """Rows of a whole store, read one at a time."""

    def __init__(self, folder: Path, target: str, taps: Sequence[int]):
        """Refuses what was made for another target or other taps, and a store that is not whole."""
        file = folder / INDEX
        if not file.exists():
            raise UserError(f"store {folder}: has no {INDEX}; make it with nonet draft train, or name another")
        self.folder, self.settings = folder, json.loads(file.read_text())
        if self.settings["target"] != target:
            raise UserError(
                f"store {folder}: was made by the target {self.settings['target']}, this one is {target}; make it anew"
            )
        if self.settings["taps"] != list(taps):
            raise UserError(
                f"store {folder}: holds taps {self.settings['taps']}, wanted are {list(taps)}; make it anew"
            )
        shards = self.settings["shards"]
        if sum(s["rows"] for s in shards) < self.settings["rows"]:
            raise UserError(f"store {folder}: its capture was stopped half-way; run the same command again")
        self.width, self.taps = int(self.settings["width"]), tuple(taps)
        self._own_hidden = self.settings["layers"] not in self.taps
        self._files = [safe_open(folder / s["file"], framework="pt") for s in shards]
        self._places: list[tuple[int, int, int]] = []  # of each row: shard, begin, end
        for i, f in enumerate(self._files):
            ends = f.get_tensor("lengths_R").cumsum(0).tolist()
            self._places += [(i, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lengths(self) -> list[int]:
        return [end - begin for _, begin, end in self._places]

    @property
    def bytes(self) -> int:
        return sum((self.folder / s["file"]).stat().st_size for s in self.settings["shards"])

    def masked(self, index: int, begin: int = 0, end: int | None = None) -> int:
        """How many of these tokens the target wrote."""
        return int(self._files[self._places[index][0]].get_slice("mask_N")[self._cut(index, begin, end)].sum())

    def _cut(self, index: int, begin: int, end: int | None) -> slice:
        _, first, last = self._places[index]
        return slice(first + begin, last if end is None else min(last, first + end))

    def row(self, index: int, begin: int = 0, end: int | None = None) -> Stored:
        """Row `index`, or its tokens [begin, end)."""
        f, cut = self._files[self._places[index][0]], self._cut(index, begin, end)
        scales = f.get_slice("scales_NK")[cut] if self.settings["kind"] == "fp8" else None
        vectors_TF = decoded(f.get_slice("vectors_NF")[cut], scales)
        tapped = len(self.taps) * self.width
        tokens_T, mask_T = f.get_slice("tokens_N")[cut].long(), f.get_slice("mask_N")[cut].bool()
        at = self.taps.index(self.settings["layers"]) * self.width if not self._own_hidden else tapped
        lse_T = f.get_slice("lse_N")[cut]
        return Stored(tokens_T, mask_T, lse_T, vectors_TF[:, :tapped], vectors_TF[:, at : at + self.width])
