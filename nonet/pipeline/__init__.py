"""Recipe stages: what `nonet run` chains, skips and resumes."""

from nonet.pipeline.recipe import Recipe, load_recipe
from nonet.pipeline.runner import run_recipe

__all__ = ["Recipe", "load_recipe", "run_recipe"]
