"""Which thread computes. OpenMP gives every thread that enters a parallel part helpers of its own and keeps them; with
more threads than processors, waiting ones go to sleep at once, and every part begins with waking them. An engine that
runs in another thread than the one which loaded it then takes three times as long (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_helpers() -> Iterator[None]:
    """For a thread that prepares what another one will run: it gathers no helpers. Torch's number of threads is as
    before afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
