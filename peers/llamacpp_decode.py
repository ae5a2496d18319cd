"""llama.cpp's side of `nonet bench decode`, in a venv of its own: greedy generations of one GGUF file, one row.

python peers/llamacpp_decode.py WORK.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp as xlc

from nonet.bench.decode_models import Case, Work, prompt, slope
from nonet.bench.turns import Turns


def main(work: Work) -> None:
    turns = Turns()
    params = xlc.CommonParams()
    params.model.path = work.model
    params.n_ctx, params.n_parallel, params.port = 1024, 1, 0
    params.warmup, params.fit_params = True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work.threads
    server = xlc.Server(params)
    turns.ready(log_probs=likeliest(post(server, work.cases[0], 1)), threads=work.threads)
    while turns.wait():
        figures: dict[str, float] = {}
        for case in work.cases:
            figures |= slope(timed(server, case, case.short), timed(server, case, case.long), case)
        turns.step(**figures)
    turns.done()


def likeliest(answer: dict[str, Any]) -> dict[str, float]:
    """Log-probs, by token id, of the likeliest tokens after the prompt."""
    return {str(entry["id"]): entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}


def timed(server: Any, case: Case, tokens: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    post(server, case, tokens)
    return time.perf_counter() - wall, time.process_time() - cpu


def post(server: Any, case: Case, tokens: int) -> dict[str, Any]:
    """llama.cpp's own HTTP interface. ignore_eos: exactly `tokens` tokens."""
    body = {"prompt": prompt(case, 0), "n_predict": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"cache_prompt": False} | ({"n_probs": 16} if tokens == 1 else {})
    request = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
    with urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())


if __name__ == "__main__":
    main(Work.read(Path(sys.argv[1])))
