"""Our side of `kda`, a process of its own: every figure that needs no peer venv, once per "go", in thread CPU seconds.

transformers' fallback runs here too; its function takes a transposed, unscaled q and applies the scale itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nonet import native
from nonet.bench.kda_inputs import HEADS, LENGTHS, LOWER, WIDTH, digest, made
from nonet.bench.turns import Turns
from nonet.ops.kda import kda, kda_chunk, kda_step_
from nonet.ops.kda_native import step_call

SQUARE = 2048  # of the sgemm that stands for the core's peak
STEP_HEADS = 8
STEPS = {1: 200, 64: 6}  # batch -> decode steps in a figure


def main() -> None:
    turns = Turns()
    torch.set_num_threads(1)
    if native.library() is None:
        raise SystemExit(f"needs the native library: {native.reason()}")
    work = Work()
    turns.ready(
        threads=torch.get_num_threads(),
        level=native.level(),
        digests={str(T): digest(work.forward(T)) for T in LENGTHS},
        transformers_digests={str(T): digest(work.transformers(T)) for T in LENGTHS},
    )
    while turns.wait():
        turns.step(**work.figures())
    turns.done()


def timed(run: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one run among `times`, after one that fills the caches and the allocator."""
    run()
    began = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - began) / times


class Work:
    def __init__(self) -> None:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        self._peer = chunk_kimi_delta_attention
        self.cases = {T: made(T) for T in LENGTHS}
        self.square = torch.randn(SQUARE, SQUARE)
        self.product = torch.empty(SQUARE, SQUARE)
        self.steps = {B: self._step_case(B) for B in STEPS}
        self.leaves = {T: [x.clone().requires_grad_() for x in case] for T, case in self.cases.items()}
        self.upstream = {T: torch.ones(1, T, HEADS, WIDTH) for T in LENGTHS}

    def figures(self) -> dict[str, float]:
        out: dict[str, float] = {}
        with torch.no_grad():
            for T in LENGTHS:
                out[f"native_{T}"] = timed(lambda T=T: self.forward(T), 3)
                out[f"sgemm_{T}"] = timed(lambda: torch.mm(self.square, self.square, out=self.product))
                out[f"torch_{T}"] = timed(lambda T=T: self.forward(T, native=False))
                out[f"transformers_{T}"] = timed(lambda T=T: self.transformers(T))
            for B, times in STEPS.items():
                for name, run in self.step_ways(B).items():
                    out[f"step_{name}_{B}"] = timed(run, times)
        for T in LENGTHS:
            out[f"native_both_{T}"] = timed(lambda T=T: self.both(T, True), 3)
            out[f"torch_both_{T}"] = timed(lambda T=T: self.both(T, False))
        return out

    def forward(self, T: int, native: bool = True) -> Tensor:
        return kda(*self.cases[T], state_NHKV=None, lower_bound=LOWER, native=native)[0]

    def transformers(self, T: int) -> Tensor:
        q, k, v, g, beta = self.cases[T]
        return self._peer(q * WIDTH**0.5, k, v, g, beta, output_final_state=True)[0]

    def both(self, T: int, native: bool) -> None:
        """Forward and backward to every input; torch's side is autograd through the chunk form."""
        leaves = self.leaves[T]
        if native:
            o = kda(*leaves, state_NHKV=None, lower_bound=LOWER)[0]
        else:
            o = kda_chunk(*leaves, state_BHKV=torch.zeros(1, HEADS, WIDTH, WIDTH), lower_bound=LOWER)[0]
        torch.autograd.grad(o, leaves, self.upstream[T])

    def step_ways(self, B: int) -> dict[str, Callable[[], Any]]:
        """C as the engine's decode loop drives it, over tensors that stay; C through `kda_step_`; torch."""
        q, k, v, g, beta, S = self.steps[B]
        prepared = step_call(q, k, v, g, beta, S)
        assert prepared is not None
        run, words, o = prepared

        def again() -> Tensor:
            run(words)
            return o  # held here: C writes to it

        return {
            "native": again,
            "called": lambda: kda_step_(q, k, v, g, beta, S),
            "torch": lambda: kda_step_(q, k, v, g, beta, S, native=False),
        }

    def _step_case(self, B: int) -> list[Tensor]:
        case = [x[:, 0] for x in made(1, STEP_HEADS, WIDTH, B)]
        return [*case, torch.zeros(B, STEP_HEADS, WIDTH, WIDTH)]


if __name__ == "__main__":
    main()
