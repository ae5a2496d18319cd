"""A draft in vLLM, in its own venv: greedy answers in float32, and how many tokens each verifying step wrote.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=2 python peers/vllm_draft.py QUESTION.json ANSWER.json

QUESTION: {"target": path, "draft": path, "drafted": K, "tokens": n, "prompts": [[id, ...], ...]}
ANSWER:   {"answers": [{"tokens": [id, ...], "steps": [tokens of step 1, of step 2, ...]}, ...], "version": str}
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def main(question: Path, answer: Path) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(question.read_text())
    llm = LLM(
        asked["target"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=1,
        enable_prefix_caching=False, disable_log_stats=True,
        speculative_config={
            "method": "eagle3", "model": asked["draft"], "num_speculative_tokens": asked["drafted"],
        },
    )  # fmt: skip
    n = asked["tokens"]
    how = SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True)
    answers = [answered(llm.llm_engine, str(i), ids, how) for i, ids in enumerate(asked["prompts"])]
    answer.write_text(json.dumps({"answers": answers, "version": metadata.version("vllm-cpu")}))


def answered(engine: Any, name: str, prompt: list[int], how: Any) -> dict[str, Any]:
    """One prompt by itself, a step at a time."""
    engine.add_request(name, {"prompt_token_ids": prompt}, how)
    tokens: list[int] = []
    steps: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = list(output.outputs[0].token_ids)
            if len(now) > len(tokens):
                steps.append(len(now) - len(tokens))
            tokens = now
    return {"tokens": tokens, "steps": steps}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
