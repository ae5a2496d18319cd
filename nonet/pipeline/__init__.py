"""Recipe stages: what `nonet run` chains, skips and resumes."""

from nonet.pipeline.main_job import run_recipe
from nonet.pipeline.recipe import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe", "run_recipe"]
