"""Places where an agent's tools act: a real temporary directory, and a runner for untrusted Python programs.

Owns: `LocalSandbox` (files and tools), `run_python` (one program, bounded in time, memory and reach).
Refuses: talking to models, and judging what happened; that is `nonet.tasks`.
"""

from nonet.sandbox.local import LocalSandbox
from nonet.sandbox.python_runner import isolation, run_python
from nonet.sandbox.tool_specs import TOOLS

__all__ = ["TOOLS", "LocalSandbox", "isolation", "run_python"]
