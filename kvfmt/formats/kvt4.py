"""kvt4: 6, 4, 3 and 3 bits for the quarters of 64 values, one f16 scale, 4.25 bits per value. For K, ordered by a profile."""

from __future__ import annotations

from . import _allocated

ALLOCATION = _allocated.Allocation(
    bits=(6, 4, 3, 3),
    levels=(
        (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 30, 32)
        + (35, 37, 40, 42, 45, 48, 51, 55, 58, 62, 67, 72, 77, 85, 94, 109),
        (4, 11, 19, 27, 36, 47, 60, 79),
        (7, 22, 39, 62),
    ),
    weights=(54, 4, 1),
)

FORMAT = _allocated.make_format("kvt4", 777, ALLOCATION, "Lloyd-Max, 6, 4, 3, 3 bits")
SPEC = FORMAT.spec
