"""A small RL run in processes that can be killed: python -m nonet.bench.killed_worker MODEL_DIR RUN_DIR STEPS.

Each line on standard input forks a process that continues the run: "pid N" is printed, "at PHASE STEP" as it enters
each phase of an iteration, and "exit STATUS" once it has ended. What is killed is a real process; forking saves
importing torch at each start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nonet import tasks
from nonet.chat import Tokenizer
from nonet.harness import load_spec
from nonet.model import hf
from nonet.protocols import Sandbox
from nonet.rl import Loop, RLConfig
from nonet.rl.setting import Setting
from nonet.run import Run
from nonet.types import Message, Task

PHASES = ("generation", "parking", "update", "checkpoint")
SEED = 7
Tell = Callable[[str, int], None]  # phase, iterations done before it


def config(steps: int) -> RLConfig:
    """A checkpoint now and then, not at every iteration: a kill undoes some."""
    return RLConfig(
        steps=steps, groups=3, samples=3, fraction=0.5, max_tokens=36, max_batch=7, temperature=1.2, lr=1e-3,
        save_every_s=0.2,
    )  # fmt: skip


def job(
    model_directory: Path, out: Path, steps: int, tell: Callable[[str, int], None] = lambda phase, step: None
) -> None:
    """Fit to the end and leave the weights in final.pt; as interruptible as `Loop.fit` is."""
    model = hf.load(model_directory)
    source = tasks.load("agents.move,general.reverse", difficulty=1)
    setting = Setting(source, load_spec("terse"), Tokenizer(model_directory), {"varied": varied}, ("low",))
    run = Run(out, config(steps).model_dump(mode="json"))
    loop = Loop(model, setting, config(steps), run, SEED)
    methods = ((loop.rollout, "run"), (loop.park, "write"), (loop.learner, "step"), (loop, "_save"))
    for phase, (owner, name) in zip(PHASES, methods, strict=True):
        setattr(owner, name, told(getattr(owner, name), phase, loop, tell))
    loop.fit()
    torch.save(model.state_dict(), out / "final.pt")


def told(method: Callable[..., Any], phase: str, loop: Loop, tell: Tell) -> Callable[..., Any]:
    """The method, announced each time."""

    def announced(*arguments: Any, **named: Any) -> Any:
        tell(phase, loop.step)
        return method(*arguments, **named)

    return announced


def varied(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """A reward on which siblings differ: it counts letters of what was said and left behind."""
    said = "".join(m.text for m in transcript if m.role == "assistant")
    left = "".join(f"{k}{v}" for k, v in sorted(sandbox.files().items())) if sandbox is not None else ""
    return len(set(said + left)) % 7 / 7


def serve(model_directory: Path, out: Path, steps: int) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                job(model_directory, out, steps, lambda phase, step: say(f"at {phase} {step}"))
            except BaseException as e:
                (out / "error.txt").write_text(f"{type(e).__name__}: {e}")
                os._exit(1)
            os._exit(0)
        say(f"pid {pid}")
        say(f"exit {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


def say(line: str) -> None:
    """In one write, so that lines of two processes do not mix."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
