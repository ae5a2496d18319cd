"""A small RL run in processes that can be killed: python rl_job.py MODEL_DIR RUN_DIR.

Each line on standard input forks a process that continues the run; its id, then its exit status, are printed.
What is killed is a real process; forking saves importing torch at each start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tiny
import torch

from nonet.chat import Tokenizer
from nonet.model import hf
from nonet.rl import Loop, RLConfig
from nonet.run import Run

CONFIG = RLConfig(
    steps=14, groups=3, samples=3, fraction=0.5, max_tokens=36, max_batch=7, temperature=1.2, lr=1e-3, save_every_s=0.2
)


def job(model_directory: Path, out: Path) -> None:
    """Fit to the end and leave the weights in final.pt; as interruptible as `Loop.fit` is."""
    model = hf.load(model_directory)
    setting = tiny.setting(Tokenizer(model_directory), rewards={"varied": tiny.varied})
    Loop(model, setting, CONFIG, Run(out, CONFIG.model_dump(mode="json")), seed=7).fit()
    torch.save(model.state_dict(), out / "final.pt")


def serve(model_directory: Path, out: Path) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                job(model_directory, out)
            except BaseException as e:
                (out / "error.txt").write_text(f"{type(e).__name__}: {e}")
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
