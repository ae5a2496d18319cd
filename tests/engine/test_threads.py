"""A thread that prepares an engine for another one leaves no OpenMP helpers behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, torch
from nonet.engine.threads import without_helpers
def count(): return len(os.listdir("/proc/self/task"))
def work():
    torch.randn(1 << 20).exp()
    return count()
torch.set_num_threads(2)
before = count()
with without_helpers():
    inside = work()
print(before, inside, work(), torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc to count threads")
def test_no_helpers_are_gathered_inside_and_the_number_of_threads_comes_back():
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, inside, outside, threads = map(int, said.split())
    assert inside == before < outside
    assert threads == 2
