"""How fast this machine reads memory: what bounds a cache that has to be read whole for every token."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

#: Far beyond any cache of the processor.
ARRAY_BYTES = 512 << 20
REPEATS = 5


@njit(nogil=True, cache=True)
def _read(words):
    # Four sums that do not wait for each other; the compiler makes vectors of them.
    a, b, c, d = 0, 0, 0, 0
    for i in range(0, len(words) - 3, 4):
        a += words[i]
        b += words[i + 1]
        c += words[i + 2]
        d += words[i + 3]
    return a + b + c + d


def read_bandwidth(threads: int, n_bytes: int = ARRAY_BYTES) -> float:
    """Bytes a second that ``threads`` read together from memory: the best of five passes over ``n_bytes``."""
    words = np.ones(n_bytes // 8, np.int64)
    parts = np.array_split(words, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read, [p[:8] for p in parts]))
        for _ in range(REPEATS):
            began = time.perf_counter()
            total = sum(pool.map(_read, parts))
            best = min(best, time.perf_counter() - began)
            if total != len(words):
                raise AssertionError(f"{total} of {len(words)} words were read")
    return words.nbytes / best
