"""How far our forward is from transformers' on the same directory.

Owns: the measured figure behind "this directory is read correctly". Both run in float32 on the CPU.
Invariant: log-probs over the whole vocabulary are compared at every position of every prompt.
Refuses: to run without transformers installed, and families transformers has no code for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.model import Model, SequenceState, hf
from nonet.model.hf_config import family_of
from nonet.types import UserError


@torch.no_grad()
def parity(directory: Path | str, prompts: int = 20, seed: int = 0) -> dict[str, Any]:
    """Largest log-prob differences against transformers over random prompts of 1 to 512 tokens.

    max_logprob_diff          whole prompts in one forward
    max_logprob_diff_cached   the last positions when they come one token at a time after a prefill
    """
    ours = hf.load(directory)
    if family_of(ours.config) == "kimi_k3":
        raise UserError(
            f"{directory}: model_type = 'kimi_k3' is not implemented by transformers; compare a llama, qwen2, qwen3 or "
            "kimi_linear directory (`nonet export --to gguf` and llama.cpp run this one)"
        )
    theirs = _transformers(directory)
    fresh = cached = 0.0
    lengths = prompt_lengths(prompts, min(512, ours.config.max_position))
    generator = torch.Generator().manual_seed(seed)
    for length in lengths:
        tokens_1T = torch.randint(0, ours.config.vocab_size, (1, length), generator=generator)
        want = theirs(tokens_1T).logits[0].float().log_softmax(-1)
        fresh = max(fresh, _difference(ours.logits(ours(tokens_1T))[0], want))
        tail = _cached_logits(ours, tokens_1T, min(length, 4))
        cached = max(cached, _difference(tail, want[-len(tail) :]))
    return {
        "max_logprob_diff": fresh,
        "max_logprob_diff_cached": cached,
        "prompts": prompts,
        "tokens": sum(lengths),
        "lengths": [lengths[0], lengths[-1]],
        "seed": seed,
    }


def prompt_lengths(prompts: int, longest: int) -> list[int]:
    """Evenly spread on a log scale, both ends included.

    >>> prompt_lengths(4, 512)
    [1, 8, 64, 512]
    """
    if prompts < 2:
        return [longest] * prompts
    return [round(longest ** (i / (prompts - 1))) for i in range(prompts)]


def _difference(logits_TW: Tensor, want_TW: Tensor) -> float:
    return float((logits_TW.log_softmax(-1) - want_TW).abs().max())


def _cached_logits(model: Model, tokens_1T: Tensor, steps: int) -> Tensor:
    """Logits of the last `steps` positions, each computed alone on top of a cache."""
    T = tokens_1T.shape[1]
    state = SequenceState.new(model.config, 1, T, torch.float32)
    if steps < T:
        model(tokens_1T[:, : T - steps], state)
    hidden = [model(tokens_1T[:, t : t + 1], state) for t in range(T - steps, T)]
    return model.logits(torch.cat(hidden, 1))[0]


def _transformers(directory: Path | str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as e:
        raise UserError("parity needs transformers, which is not installed; run: pip install transformers") from e
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
