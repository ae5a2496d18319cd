"""vLLM's side of `nonet bench decode`, in a venv of its own: bfloat16, greedy, whole generations through its engine.

VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=2 python peers/vllm_decode.py WORK.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from nonet.bench.decode_models import Case, Work, digest, prompt, slope
from nonet.bench.turns import Turns


def main(work: Work) -> None:
    turns = Turns()
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(work.threads)
    most = max(case.rows for case in work.cases)
    llm = LLM(
        work.model, dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=most, max_logprobs=-1,
        enable_prefix_caching=False,
    )  # fmt: skip

    def generate(case: Case, tokens: int) -> tuple[float, float]:
        how = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt(case, row)} for row in range(case.rows)]
        wall, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, how, use_tqdm=False)
        return time.perf_counter() - wall, time.process_time() - cpu

    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    answer = llm.generate([{"prompt_token_ids": prompt(work.cases[0], 0)}], asked, use_tqdm=False)[0].outputs[0]
    found = answer.logprobs[0]
    turns.ready(log_probs=digest([found[i].logprob for i in range(64)]), threads=work.threads)
    while turns.wait():
        figures: dict[str, float] = {}
        for case in work.cases:
            figures |= slope(generate(case, case.short), generate(case, case.long), case)
        turns.step(**figures)
    turns.done()


if __name__ == "__main__":
    main(Work.read(Path(sys.argv[1])))
