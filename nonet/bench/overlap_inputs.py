"""What both sides of `nonet bench overlap` work on, and how a pass is timed and its memory counted.

Imports torch and the standard library only: the peer runs it in a venv of its own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROWS, WIDTH, TOKENS, KEPT = 512, 576, 151_936, 8192
CASES = {"whole": TOKENS, "pruned": KEPT}  # case -> tokens of the draft


class Inputs(NamedTuple):
    """A draft near its target: hidden states [T, D], heads [tokens, D], and the draft's map where it is pruned."""

    draft_TD: Tensor
    draft_WD: Tensor
    target_TD: Tensor
    target_VD: Tensor
    d2t_W: Tensor | None


Loss = Callable[[Inputs], Tensor]  # the mean over rows, to be sent backward


def made(kept: int, rows: int = ROWS, tokens: int = TOKENS) -> Inputs:
    """The same numbers in every process; nothing larger than the inputs is allocated on the way."""
    gen = torch.Generator().manual_seed(0)
    target_TD = torch.empty(rows, WIDTH).normal_(generator=gen)
    target_VD = torch.empty(tokens, WIDTH).normal_(0, 0.12, generator=gen)
    d2t_W = None if kept == tokens else torch.randperm(tokens, generator=gen)[:kept].sort()[0]
    draft_TD = target_TD + 0.5 * torch.empty(rows, WIDTH).normal_(generator=gen)
    draft_WD = target_VD.clone() if d2t_W is None else target_VD[d2t_W]
    return Inputs(draft_TD.requires_grad_(), draft_WD.requires_grad_(), target_TD, target_VD, d2t_W)


def passed(loss: Loss, inputs: Inputs) -> tuple[float, list[float]]:
    """(CPU seconds of one pass forward and backward, [loss, size of the gradients of hidden states and head])."""
    inputs.draft_TD.grad = inputs.draft_WD.grad = None
    began = time.process_time()
    mean = loss(inputs)
    mean.backward()
    taken = time.process_time() - began
    assert inputs.draft_TD.grad is not None and inputs.draft_WD.grad is not None
    return taken, [float(mean.detach()), float(inputs.draft_TD.grad.norm()), float(inputs.draft_WD.grad.norm())]


def extra_bytes(loss: Loss, inputs: Inputs) -> int:
    """Peak resident size of this process over one pass, less what it had before and less the gradients it leaves."""
    passed(loss, made(40, 64, 40))  # libraries and their buffers
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    passed(loss, inputs)
    left = [x.grad.nbytes for x in inputs[:2] if x.grad is not None]
    return _status("VmHWM") - before - sum(left)


def report_memory(forms: dict[str, Loss]) -> bool:
    """If this process was started as `SCRIPT memory FORM CASE`: print its extra bytes as JSON, and True."""
    if sys.argv[1:2] != ["memory"]:
        return False
    torch.set_num_threads(1)
    _, _, form, case = sys.argv
    print(json.dumps(extra_bytes(forms[form], made(CASES[case]))))
    return True


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
