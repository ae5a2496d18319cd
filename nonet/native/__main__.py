"""`python -m nonet.native`: build the library of this processor now and say what came of it.

Always ends with status 0 unless the user asked for a level that cannot be: without a library everything runs on torch.
"""

from __future__ import annotations

import sys
import time

from nonet import native
from nonet.types import UserError


def main() -> int:
    began = time.perf_counter()
    try:
        refused = native.reason()
    except UserError as e:
        print(f"native: {e}", file=sys.stderr)
        return 2
    if refused:
        print(f"native: none ({refused}); torch does the work, slower")
        return 0
    level = native.level()
    seconds = time.perf_counter() - began
    print(f"native: level {level}, compiler {native.compiler() or 'none now'}, {native.build(level)}, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
