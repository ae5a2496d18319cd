"""The tensors of a model directory, found by name and read one at a time.

Owns: the names, without what a checkpoint with a vision tower puts before them. Nothing but headers is read until
`read` is called. Refuses, naming file and tensor: names that are not there, values that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from nonet.model.hf_files import Entry, checked, headers, open_shard
from nonet.model.hf_names import PREFIX
from nonet.types import UserError


class Weights:
    """Name (without PREFIX) -> tensor of a directory's model.safetensors or shards.

    >>> Weights("models/mine").read("model.norm.weight").shape  # doctest: +SKIP
    torch.Size([256])
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self.found = {name.removeprefix(PREFIX): entry for name, entry in headers(self.directory).items()}
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def entry(self, name: str) -> Entry:
        """File, shape and safetensors type ("F32", "BF16", "U8", ...) of a tensor."""
        if name not in self.found:
            raise UserError(f"{self.directory}: the weights lack {name}; correct config.json or replace the weights")
        return self.found[name]

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored; floating-point ones are finite in every value."""
        entry = self.entry(name)
        if entry.file not in self._open:
            self._open[entry.file] = open_shard(entry.file)
        tensor = self._open[entry.file].get_tensor(entry.name)
        return checked(tensor, name, entry.file) if tensor.is_floating_point() else tensor
