"""speculators' side of `nonet bench overlap`: its eager negative log acceptance, on logits made by plain products.

The loss is loaded from its file: importing the package would import its transformers models, and with them a
torchvision that has no build for this torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location

import torch
from torch import Tensor

from nonet.bench.overlap_inputs import CASES, Inputs, made, passed, report_memory
from nonet.bench.turns import Turns


def eager(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of speculators/losses/eager.py."""
    file = metadata.distribution("speculators").locate_file("speculators/losses/eager.py")
    spec = spec_from_file_location("speculators_eager", str(file))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> None:
    neg_log_acceptance = eager("neg_log_acceptance_loss")

    def loss(x: Inputs) -> Tensor:
        with torch.no_grad():
            target_VD = x.target_VD if x.d2t_W is None else x.target_VD[x.d2t_W]  # a pruned head, as its trainer has
            targets = x.target_TD @ target_VD.T
        return neg_log_acceptance((x.draft_TD @ x.draft_WD.T)[None], targets[None]).mean()

    if report_memory({"speculators": loss}):
        return
    turns = Turns()
    torch.set_num_threads(1)
    inputs = made(CASES[sys.argv[1]])
    turns.ready(
        versions={name: metadata.version(name) for name in ("speculators", "torch")},
        digests={"speculators": passed(loss, inputs)[1]},
    )
    while turns.wait():
        turns.step(speculators=passed(loss, inputs)[0])
    turns.done()


if __name__ == "__main__":
    main()
