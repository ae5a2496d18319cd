"""`nonet eval`: held-out reward of a model directory, printed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from nonet import tasks as task_room
from nonet.chat import Tokenizer
from nonet.harness import load_spec
from nonet.model import hf
from nonet.pipeline.cells import MODES
from nonet.rl.evaluate import eval_event, evaluate
from nonet.rl.setting import Setting
from nonet.types import Trajectory


def print_evaluation(
    model: Path,
    tasks: str,
    prompts: int,
    reward: str,
    harness: str,
    max_tokens: int,
    effort: str,
    difficulty: int,
    show: int,
) -> None:
    tokenizer = Tokenizer(model)
    rewards = {reward: task_room.load_reward(reward)} if reward else None
    source = task_room.load(tasks, difficulty=difficulty)
    setting = Setting(source, load_spec(harness), tokenizer, rewards, (effort,))
    weights, console = hf.load(model), Console()
    table = Table("mode", "prompts", "reward", "95% interval", "tokens", "failed", title=f"{tasks}, held out")
    done: list[Trajectory] = []
    for mode, temperature in MODES.items():
        done = evaluate(weights, setting, range(prompts), temperature, max_tokens)
        e = eval_event(done)
        interval = f"[{e['low']:.3f}, {e['high']:.3f}]"
        table.add_row(mode, str(e["n"]), f"{e['reward']:.3f}", interval, f"{e['length']:.1f}", str(e["failed"]))
    console.print(table)
    for t in done[:show]:
        console.rule(f"{t.task_id}: reward {t.reward:.2f}, {t.stop_reason}")
        console.print(tokenizer.decode(t.tokens), markup=False)
