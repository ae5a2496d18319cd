"""transformers' side of `decode`: its own model class and cache, greedy, float32."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nonet.bench.decode_models import Case, Work, digest, prompt
from nonet.bench.decode_worker import LONG
from nonet.bench.turns import Turns


def main(work: Work) -> None:
    turns = Turns()
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        turns.ready(log_probs=first(model, work.cases[0]), threads=work.threads)
        caches = {case.key: filled(model, case) for case in work.cases if case.past >= LONG}
        while turns.wait():
            figures: dict[str, float] = {}
            for case in work.cases:
                figures |= steps(model, case, caches.get(case.key))
            turns.step(**figures)
    turns.done()


def first(model: Any, case: Case) -> dict[str, float]:
    ids = prompt(case, 0) if case.past < LONG else [5]
    return digest(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).tolist())


def steps(model: Any, case: Case, cache: Any) -> dict[str, float]:
    """Seconds of one step over all rows, after the prompt and one step that warms up; a filled cache is cut back."""
    if cache is None:
        out = model(torch.tensor([prompt(case, row) for row in range(case.rows)]), use_cache=True)
        count, cache = case.long - case.short, out.past_key_values
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    else:
        count, token = case.short, torch.full((case.rows, 1), 5)
    token = fed(model, token, cache)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        token = fed(model, token, cache)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    if case.past >= LONG:
        cache.crop(-count - 1)
    return {f"wall_{case.key}": seconds[0] / count, f"cpu_{case.key}": seconds[1] / count}


def fed(model: Any, token: Tensor, cache: Any) -> Tensor:
    return model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)


def filled(model: Any, case: Case) -> Any:
    """A cache of case.past positions of noise: latents, which transformers expands at every step."""
    cache = model(torch.full((case.rows, 1), 5), use_cache=True).past_key_values
    for i, layer in enumerate(cache.layers):
        more = [torch.randn(case.rows, 1, case.past - 1, t.shape[-1]) for t in (layer.keys, layer.values)]
        cache.update(more[0], more[1], i)
    return cache


if __name__ == "__main__":
    main(Work.read(Path(sys.argv[1])))
