"""How an agent talks: a HarnessSpec turns Messages into text and back, and an Episode runs one attempt at a task."""

from nonet.harness.episode import Episode
from nonet.harness.spec import load_spec
from nonet.harness.syntax import parse_assistant, phrases, render_assistant

__all__ = ["Episode", "load_spec", "parse_assistant", "phrases", "render_assistant"]
