"""RL with partial rollouts. Reading order: loop.py (one iteration), pool.py, rollout.py, advantage.py, batch.py,
objective.py, learner.py.
"""

from nonet.rl.config import RLConfig
from nonet.rl.loop import Loop

__all__ = ["Loop", "RLConfig"]
