"""Holds numpy's and scipy's matrix products to one thread."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import numpy
import scipy

_PREFIXES = ("scipy_openblas_", "openblas_")
_SUFFIXES = ("64_", "")


def _libraries() -> list[tuple[ctypes._CFuncPtr, ctypes._CFuncPtr]]:
    """(get, set) of the number of threads, for every OpenBLAS that came with numpy and scipy; none for other BLAS."""
    found = []
    for package in (numpy, scipy):
        for path in Path(package.__file__).parent.parent.glob(f"{package.__name__}.libs/*openblas*"):
            library = ctypes.CDLL(str(path))
            names = [(f"{p}get_num_threads{s}", f"{p}set_num_threads{s}") for p in _PREFIXES for s in _SUFFIXES]
            found += [(getattr(library, g), getattr(library, s)) for g, s in names if hasattr(library, g) and hasattr(library, s)][:1]
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """While llama.cpp computes in turns with numpy: its threads still spin when numpy's start, and small products become
    20 times slower (measured on two cores). With another BLAS than OpenBLAS nothing is changed."""
    libraries = _libraries()
    before = [get() for get, _ in libraries]
    for _, set_ in libraries:
        set_(1)
    try:
        yield
    finally:
        for (_, set_), n in zip(libraries, before):
            set_(n)
