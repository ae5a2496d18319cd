"""Generation: Requests in, Completions out."""

from nonet.engine.engine import Engine

__all__ = ["Engine"]
