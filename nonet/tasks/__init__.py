"""What a policy is asked to do, and how its attempts are judged.

    source = load("general,agents")            # or gym:NAME, pkg.module:attribute, FILE.jsonl
    task = source.task("train", 0, effort="max")
    turns = source.demonstrate(task)           # assistant turns of a correct solution, or None
    score = load_reward(task.rewards[0])(task, transcript, sandbox)

Owns: generators, the split rule, verifiers. Refuses: running models; rendering; torch.
"""

from nonet.tasks.catalog import SourceInfo, list_sources, load
from nonet.tasks.rewards import REWARDS, load_reward
from nonet.tasks.source import Generated, Mixture, Problem, Split, split_of, tagged

__all__ = [
    "REWARDS",
    "Generated",
    "Mixture",
    "Problem",
    "SourceInfo",
    "Split",
    "list_sources",
    "load",
    "load_reward",
    "split_of",
    "tagged",
]
