"""A server whose engine takes its time, as a process that signals can be sent to. Arguments: tokenizer, step_s,
drain_s, breaks_at.
"""

from __future__ import annotations

import sys

from typist import Typist

from nonet.chat import Tokenizer
from nonet.serve import Address, Limits, serve

if __name__ == "__main__":
    directory, step_s, drain_s, breaks_at = sys.argv[1:]
    tokenizer = Tokenizer(directory)
    words = tokenizer.encode("hello ")
    typist = Typist(lambda _: words, tokenizer.decode, step_s=float(step_s), breaks_at=int(breaks_at))
    sys.exit(serve(typist, tokenizer, "slow", Address(port=0), Limits(drain_s=float(drain_s))))
