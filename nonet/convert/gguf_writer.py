"""A model directory -> one GGUF file that llama.cpp runs: `nonet export MODEL OUT --to gguf`.

Owns: the choice of architecture (gguf_decoder.py: llama, qwen2, qwen3; gguf_k3.py: kimi-k3), and the writing of a plan.
Invariant: the file appears whole or not at all, and at most one of its tensors is held in memory at a time.
Refuses: to replace anything but a GGUF file, and whatever the architectures have no place for.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import psutil

from nonet.convert import gguf_decoder, gguf_k3
from nonet.convert.gguf_plan import DROPPABLE, Dtype, Item, Kind, Options, Plan
from nonet.convert.gguf_vocab import vocabulary
from nonet.convert.weights import Weights
from nonet.model.hf_config import read_json
from nonet.progress import progress
from nonet.types import UserError

MAGIC = b"GGUF"
MIB = 1 << 20
FILE_TYPES = {
    Kind.F32: gguf.LlamaFileType.ALL_F32,
    Kind.F16: gguf.LlamaFileType.MOSTLY_F16,
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Kind.MXFP4: gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}


def export(
    directory: Path | str,
    out: Path | str,
    dtype: str = "keep",
    unpack: bool = False,
    drop: Collection[str] = (),
    pre: str = "",
) -> Path:
    """Write the model in `directory` as the GGUF file `out`; returns `out`.

    dtype   f32, f16 or bf16 for what is neither packed nor needed in float32 (norms, biases, convolutions, routers);
            keep: each tensor's own type
    unpack  write MXFP4 experts decoded (exactly, in f32 and bf16) instead of as MXFP4 blocks
    drop    parts to leave out that the architecture has no place for: "mtp", "vision"
    pre     llama.cpp's name of the pre-tokenizer, where none is exactly the directory's
    """
    directory, out = Path(directory), Path(out)
    options = _options(dtype, unpack, drop, pre)
    _refuse_foreign(out)
    write_whole(make_plan(directory, options), out)
    return out


def write_whole(plan: Plan, out: Path) -> None:
    """The plan's file in place of an earlier GGUF file, or nothing."""
    _refuse_foreign(out)
    with _aside(out) as building:
        write(plan, building, f"export {out.name}")


def make_plan(directory: Path, options: Options) -> Plan:
    """The whole file but for the tensors' values: architecture, metadata with vocabulary, and what each tensor is."""
    weights = Weights(directory)
    kimi = read_json(directory / "config.json").get("model_type") in ("kimi_k3", "kimi_linear")
    plan = (gguf_k3 if kimi else gguf_decoder).plan(weights, options)
    metadata = {
        **_general(plan, directory.resolve().name),
        **plan.metadata,
        **vocabulary(directory, plan.metadata[f"{plan.architecture}.vocab_size"], options.pre),
    }
    return Plan(plan.architecture, metadata, plan.items)


def write(plan: Plan, path: Path, title: str) -> None:
    """Write a plan's file. Tensors are loaded, written and let go one after another."""
    writer = gguf.GGUFWriter(str(path), plan.architecture)
    for key, value in plan.metadata.items():
        _add(writer, key, value)
    for item in plan.items:
        # float32 stands for "shape counts elements"; uint8 would make the writer read it as bytes
        writer.add_tensor_info(item.name, item.shape, np.dtype(np.float32), item.nbytes, raw_dtype=item.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, plan.items, title)
    finally:
        writer.close()


def _write_tensors(writer: gguf.GGUFWriter, items: list[Item], title: str) -> None:
    total, done = sum(item.nbytes for item in items), 0
    with progress(f"{title} (MiB)", total // MIB + 1) as bar:
        for item in items:
            array = item.load()
            if array.nbytes != item.nbytes:
                raise AssertionError(f"{item.name}: made {array.nbytes} bytes, planned {item.nbytes}")
            writer.write_tensor_data(array)
            done += item.nbytes
            bar(done // MIB, item.name)
        bar(total // MIB + 1, "")


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Metadata by Python type: counts are uint32, numbers float32, lists of counts int32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise AssertionError(f"{key} is a {type(value).__name__}, which has no GGUF type here")


def _general(plan: Plan, name: str) -> Mapping[str, Any]:
    kinds = [item.kind for item in plan.items]
    by_bytes = {kind: sum(i.nbytes for i in plan.items if i.kind == kind) for kind in dict.fromkeys(kinds)}
    main = Kind.MXFP4 if Kind.MXFP4 in by_bytes else max(by_bytes, key=lambda kind: by_bytes[kind])
    out = {"general.type": "model", "general.name": name, "general.file_type": int(FILE_TYPES[main])}
    return out | ({"general.quantization_version": gguf.GGML_QUANT_VERSION} if main == Kind.MXFP4 else {})


def _options(dtype: str, unpack: bool, drop: Collection[str], pre: str) -> Options:
    if dtype not in get_args(Dtype):
        raise UserError(f"dtype = {dtype!r}: no such choice; use one of {', '.join(get_args(Dtype))}")
    for part in drop:
        if part not in DROPPABLE:
            raise UserError(f"drop = {part!r}: no such part; use one of {', '.join(DROPPABLE)}")
    return Options(dtype, unpack, frozenset(drop), pre)  # pyright: ignore[reportArgumentType]


# --------------------------------------------------------------- all or none


def _refuse_foreign(out: Path) -> None:
    if out.is_dir():
        raise UserError(f"out = {out}: is a directory; name a file, e.g. {out / 'model.gguf'}")
    if out.exists():
        with out.open("rb") as f:
            if f.read(4) != MAGIC:
                raise UserError(f"out = {out}: exists and is not a GGUF file; name another or remove it")


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A path beside `out` that takes its place if the body succeeds; leftovers of dead exports go."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*.exporting"):
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            left.unlink()
    building = out.parent / f".{out.name}.{os.getpid()}.exporting"
    try:
        yield building
        building.replace(out)
    finally:
        building.unlink(missing_ok=True)
