"""kvt3: 5, 3, 2 and 2 bits for the quarters of 64 values, one f16 scale, 3.25 bits per value. For K, ordered by a profile."""

from __future__ import annotations

from . import _allocated

ALLOCATION = _allocated.Allocation(
    bits=(5, 3, 2, 2),
    levels=((2, 6, 10, 14, 18, 22, 26, 30, 35, 40, 46, 52, 59, 67, 78, 95), (7, 22, 39, 62), (13, 44)),
    weights=(47, 3, 1),
)

FORMAT = _allocated.make_format("kvt3", 776, ALLOCATION, "Lloyd-Max, 5, 3, 2, 2 bits")
SPEC = FORMAT.spec
