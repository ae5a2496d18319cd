"""Next-token (and multi-token) training on rows of tokens with a mask: pretraining, and the cold start before RL."""

from nonet.lm.trainer import LMConfig, train

__all__ = ["LMConfig", "train"]
