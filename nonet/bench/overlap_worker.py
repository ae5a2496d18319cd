"""Our side of `nonet bench overlap`, a process of its own: the naive form, the native one and its twin in torch."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from nonet import native
from nonet.bench.overlap_inputs import CASES, Inputs, Loss, made, passed, report_memory
from nonet.bench.turns import Turns
from nonet.ops.overlap import Head, overlap


def naive(x: Inputs) -> Tensor:
    """As the formula reads: two log_softmax over all logits, the smaller of the two, logsumexp."""
    with torch.no_grad():
        log_p = (x.target_TD @ x.target_VD.T).log_softmax(-1)
        log_p = log_p if x.d2t_W is None else log_p[:, x.d2t_W]
    log_q = (x.draft_TD @ x.draft_WD.T).log_softmax(-1)
    return -torch.minimum(log_p, log_q).logsumexp(-1).mean()


def fused(x: Inputs, use_native: bool) -> Tensor:
    draft, target = Head(x.draft_TD, x.draft_WD), Head(x.target_TD, x.target_VD)
    return overlap(draft, target, x.d2t_W, native=use_native).mean


FORMS: dict[str, Loss] = {
    "naive": naive,
    "native": lambda x: fused(x, True),
    "torch": lambda x: fused(x, False),
}


def main() -> None:
    if native.library() is None:
        raise SystemExit(f"needs the native library: {native.reason()}")
    if report_memory(FORMS):
        return
    turns = Turns()
    torch.set_num_threads(1)
    inputs = made(CASES[sys.argv[1]])
    turns.ready(
        threads=torch.get_num_threads(),
        level=native.level(),
        digests={name: passed(loss, inputs)[1] for name, loss in FORMS.items()},
    )
    while turns.wait():
        turns.step(**{name: passed(loss, inputs)[0] for name, loss in FORMS.items()})
    turns.done()


if __name__ == "__main__":
    main()
