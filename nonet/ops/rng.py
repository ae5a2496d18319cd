"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC 2011), vectorised in numpy.

A draw is a pure function of (key, counter). The engine keys by (seed, stream name) and counts by position, so results
do not depend on batch-mates, workers or pause points (law 18).
"""

from __future__ import annotations

import hashlib

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four 32-bit words per row, as uint64. counter: [..., 4], key: [..., 2], integers below 2**32."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def stream_key(seed: int, stream: str) -> tuple[int, int]:
    """The Philox key of a named stream under a seed."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def uniforms(keys: np.ndarray, positions: np.ndarray, purpose: int | np.ndarray = 0) -> np.ndarray:
    """One double in [0, 1) per row from 53 bits. keys: [B, 2] from `stream_key`; positions: [B]; purpose, one or [B],
    separates uses.
    """
    counter = np.zeros((len(positions), 4), np.uint64)
    counter[:, 0] = positions
    counter[:, 1] = purpose
    words = philox(counter, keys)
    return ((words[:, 0] >> np.uint64(5)) * np.uint64(1 << 26) + (words[:, 1] >> np.uint64(6))) / float(1 << 53)
