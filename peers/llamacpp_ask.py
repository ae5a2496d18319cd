"""Questions to llama.cpp about a GGUF file, in llama.cpp's own venv: log-probs after prompts, or ids of texts.

    python peers/llamacpp_ask.py QUESTION.json ANSWER.json

QUESTION: {"model": path, "vocab": n, "prompts": [[id, ...], ...], "texts": [str, ...], "neutral": id}
ANSWER:   {"log_probs": [[n floats], ...], "ids": [[id, ...], ...], "version": str}

Set for exactness: flash attention off, float32 cache, one thread, every prompt computed from its beginning. `neutral`
is a token whose text is plain: the sampler is pushed to it, because an answer that is half a character comes without
log-probs. They are taken before the sampler, so the push does not show in them.
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
    out = {
        "log_probs": [log_probs(server, ids, asked) for ids in asked["prompts"]],
        "ids": [tokens(server, text) for text in asked["texts"]],
        "version": metadata.version("xllamacpp"),
    }
    answer.write_text(json.dumps(out))


def parameters(asked: dict[str, Any]) -> Any:
    params = xlc.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx = max([256, *(len(ids) + 8 for ids in asked["prompts"])])
    params.n_parallel = 1
    params.warmup = False
    params.fit_params = False
    params.flash_attn_type = xlc.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xlc.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.port = 0
    return params


def log_probs(server: Any, ids: list[int], asked: dict[str, Any]) -> list[float]:
    """Of every token of the vocabulary after these ids."""
    request = {"prompt": ids, "n_predict": 1, "n_probs": asked["vocab"], "cache_prompt": False, "temperature": 0}
    found = post(server, "completion", {**request, "logit_bias": [[asked["neutral"], 1000.0]]})
    rows = found.get("completion_probabilities") or [{"top_logprobs": []}]
    by_id = {entry["id"]: entry["logprob"] for entry in rows[0]["top_logprobs"]}
    if sorted(by_id) != list(range(asked["vocab"])):
        raise AssertionError(f"log-probs of {len(by_id)} tokens, not of {asked['vocab']}: {str(found)[:500]}")
    return [by_id[i] for i in range(asked["vocab"])]


def tokens(server: Any, text: str) -> list[int]:
    return post(server, "tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]


def post(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's own HTTP interface; the Python methods know OpenAI's only."""
    request = Request(f"{server.listening_address}/{path}", json.dumps(body).encode())
    with urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
