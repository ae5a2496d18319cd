"""fla's side of `nonet bench kda`: its chunked reference on the CPU, one pass over every length per "go"."""

from __future__ import annotations

import time
from importlib import metadata

import torch
from fla.ops.kda.naive import naive_chunk_kda

from nonet.bench.kda_inputs import LENGTHS, digest, made
from nonet.bench.turns import Turns


def main() -> None:
    turns = Turns()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cases = {T: made(T) for T in LENGTHS}
    turns.ready(
        threads=torch.get_num_threads(),
        versions={name: metadata.version(name) for name in ("flash-linear-attention", "torch", "triton")},
        digests={str(T): digest(run(case)) for T, case in cases.items()},
    )
    while turns.wait():
        figures = {}
        for T, case in cases.items():
            began = time.thread_time()
            run(case)
            figures[f"fla_{T}"] = time.thread_time() - began
        turns.step(**figures)
    turns.done()


def run(case: list[torch.Tensor]) -> torch.Tensor:
    return naive_chunk_kda(*case, scale=1.0, output_final_state=True)[0]


if __name__ == "__main__":
    main()
