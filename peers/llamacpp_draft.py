"""A draft in llama.cpp, in its own venv: greedy answers in float32, and how much of what was drafted stood.

    python peers/llamacpp_draft.py QUESTION.json ANSWER.json

QUESTION: {"target": path, "draft": path, "drafted": K, "tokens": n, "prompts": [[id, ...], ...]}, both paths GGUF files
ANSWER:   {"answers": [{"tokens": [id, ...], "proposed": n, "accepted": n}, ...], "version": str}
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp as xlc


def main(question: Path, answer: Path) -> None:
    asked = json.loads(question.read_text())
    server = xlc.Server(parameters(asked))
    answers = [answered(server, ids, asked["tokens"]) for ids in asked["prompts"]]
    answer.write_text(json.dumps({"answers": answers, "version": metadata.version("xllamacpp")}))


def parameters(asked: dict[str, Any]) -> Any:
    params = xlc.CommonParams()
    params.model.path = asked["target"]
    params.n_ctx = max(len(ids) for ids in asked["prompts"]) + asked["tokens"] + 64
    params.n_parallel = 1
    params.warmup = params.fit_params = False
    params.flash_attn_type = xlc.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xlc.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.port = 0
    draft = params.speculative.draft
    params.speculative.types = [xlc.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
    draft.mparams.path = asked["draft"]
    draft.n_max, draft.n_min, draft.p_min = asked["drafted"], 0, 0.0
    draft.cache_type_k = draft.cache_type_v = xlc.ggml_type.GGML_TYPE_F32
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 2
    return params


def answered(server: Any, ids: list[int], tokens: int) -> dict[str, Any]:
    body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = Request(f"{server.listening_address}/completion", json.dumps({**body, "return_tokens": True}).encode())
    with urlopen(request, timeout=600) as reply:
        found = json.loads(reply.read())
    timings = found["timings"]
    return {
        "tokens": found["tokens"],
        "proposed": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
