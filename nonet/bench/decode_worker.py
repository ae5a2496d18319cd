"""Our side of `decode`: the engine, greedy, a whole generation at a time; or single steps over a long context."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from nonet.bench.decode_models import Case, Work, prompt, slope
from nonet.bench.turns import Turns
from nonet.engine import Engine
from nonet.model import Model, SequenceState, hf
from nonet.model.native_decode import NativeDecoder
from nonet.types import Request, Sampling

LONG = 4096  # from here on a context is not computed but filled with noise, the same on both sides


def main(work: Work) -> None:
    turns = Turns()
    torch.set_num_threads(work.threads)
    model = hf.load(Path(work.model)).float().eval().requires_grad_(False)
    ours = Ours(model, work.weights)
    turns.ready(log_probs=ours.log_probs(work.cases[0]), threads=work.threads)
    while turns.wait():
        figures: dict[str, float] = {}
        for case in work.cases:
            figures |= ours.long_context(case) if case.past >= LONG else ours.generate(case)
        turns.step(**figures)
    turns.done()


class Ours:
    def __init__(self, model: Model, weights: str):
        self.model = model
        self.engine = Engine(model, prefix_cache=False, weights=weights)
        decoder = NativeDecoder.of(model, weights)
        if decoder is None:
            raise SystemExit("needs the native decode step")
        self.decoder = decoder
        self.asked = 0
        self.states: dict[str, SequenceState] = {}

    @torch.inference_mode()
    def log_probs(self, case: Case) -> list[float]:
        """Of the whole vocabulary after the case's prompt, or one token where that is noise: by torch in float32, which
        says whose model it is, not what a format does to it.
        """
        ids = prompt(case, 0) if case.past < LONG else [5]
        return self.model.logits(self.model(torch.tensor([ids]))[0, -1]).log_softmax(-1).tolist()

    def generate(self, case: Case) -> dict[str, float]:
        return slope(self.timed(case, case.short), self.timed(case, case.long), case)

    def timed(self, case: Case, tokens: int) -> tuple[float, float]:
        for row in range(case.rows):
            self.asked += 1
            self.engine.submit(Request(f"{self.asked}", tuple(prompt(case, row)), tokens, (), Sampling(temperature=0)))
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.run()
        return time.perf_counter() - wall, time.process_time() - cpu

    @torch.inference_mode()
    def long_context(self, case: Case) -> dict[str, float]:
        state = self.states.get(case.key) or self.noisy(case)
        self.states[case.key] = state
        token = torch.full((case.rows, 1), 5)
        self.decoder.step(token, state)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(case.short):
            self.decoder.step(token, state)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        state.lengths_B -= case.short + 1
        return {f"wall_{case.key}": seconds[0] / case.short, f"cpu_{case.key}": seconds[1] / case.short}

    def noisy(self, case: Case) -> SequenceState:
        """A state of case.past positions of noise."""
        state = SequenceState.new(self.model.config, case.rows, case.past + case.short + 1, torch.float32)
        for layer in state.layers:
            for pool in layer.values():
                pool.normal_(generator=torch.Generator().manual_seed(0))
        state.lengths_B += case.past
        return state


if __name__ == "__main__":
    main(Work.read(Path(sys.argv[1])))
