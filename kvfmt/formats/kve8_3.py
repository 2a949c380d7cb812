"""kve8_3: E8 lattice words of 24 bits for 8 values, one f16 scale per 64 values, 3.25 bits per value. Meant for K."""

from __future__ import annotations

from ..codec import Format, make_drivers
from ..spec import BlockSpec, Field
from . import _e8

# One byte of row for four values: 65,536 patterns of eight as a product of 256 of four, so that the table is 1 KB
# and not 512, and stays in the L1 cache.
# Classes in order of their norm as far as 256 rows go, then whatever still fits whole.
# Against the ways to 24 bits without a product (bench/lattice_study.py): a Voronoi code of ratio 8 has 0.0233, E8P with a second
# stage of one bit 0.0264, this 0.0213.
BOOK = _e8.Codebook(
    classes=(
        ((0, 0, 0, 0), (8, 8, 8, 8)),
        ((1, 0, 0, 0), (27, 9, 9, 9)),
        ((1, 1, 0, 0), (27, 27, 9, 9)),
        ((2, 0, 0, 0), (46, 9, 9, 9)),
        ((1, 1, 1, 0), (27, 27, 27, 9)),
        ((2, 1, 0, 0), (47, 28, 9, 9)),
        ((1, 1, 1, 1), (28, 28, 28, 28)),
        ((2, 1, 1, 0), (47, 28, 28, 9)),
        ((3, 0, 0, 0), (71, 9, 9, 9)),
        ((2, 2, 0, 0), (48, 48, 9, 9)),
        ((2, 1, 1, 1), (48, 28, 28, 28)),
        ((3, 1, 0, 0), (71, 29, 10, 10)),
        ((2, 2, 1, 0), (49, 49, 29, 10)),
        ((3, 1, 1, 0), (71, 30, 30, 10)),
        ((2, 2, 1, 1), (50, 50, 30, 30)),
        ((3, 2, 0, 0), (73, 51, 10, 10)),
        ((3, 1, 1, 1), (73, 30, 30, 30)),
        ((2, 2, 2, 0), (53, 53, 53, 10)),
        ((4, 0, 0, 0), (115, 13, 13, 13)),
        ((3, 2, 1, 0), (76, 53, 32, 10)),
        ((2, 2, 2, 1), (54, 54, 54, 31)),
        ((4, 1, 0, 0), (103, 37, 13, 13)),
        ((3, 2, 1, 1), (77, 54, 32, 32)),
        ((4, 1, 1, 0), (113, 42, 42, 13)),
        ((3, 3, 0, 0), (80, 80, 12, 12)),
        ((3, 2, 2, 0), (88, 62, 62, 11)),
        ((2, 2, 2, 2), (54, 54, 54, 54)),
        ((4, 2, 0, 0), (121, 71, 18, 18)),
        ((4, 1, 1, 1), (119, 45, 45, 45)),
        ((3, 3, 1, 0), (89, 89, 40, 13)),
        ((3, 2, 2, 1), (90, 63, 63, 36)),
        ((3, 3, 1, 1), (96, 96, 44, 44)),
        ((3, 3, 3, 3), (69, 69, 69, 69)),
        ((4, 4, 4, 4), (85, 85, 85, 85)),
        ((5, 5, 5, 5), (100, 100, 100, 100)),
    ),
    shift=6,
    rms_level=46.0,
)

SPEC = BlockSpec(
    name="kve8_3",
    type_id=775,
    version=1,
    block=_e8.BLOCK,
    fields=(
        Field("d", "f16", 1, "scale"),
        Field("rows", "u8", 16, "byte r: the magnitudes of values 4 r to 4 r + 3"),
        Field("signs", "u8", 8, "bit i % 8 of byte i / 8 is set where value i is negative before the shift"),
    ),
    tables=BOOK.tables(),
    level_shift=_e8.LEVEL_SHIFT,
    rounding=_e8.ROUNDING,
    roles=("K", "V"),
    summary="E8, 24 bits for 8",
)

encode_block, decode_levels, SCRATCH = _e8.make_kernels(BOOK, SPEC.tables)

FORMAT = Format(SPEC, *make_drivers(encode_block, decode_levels, SPEC.block, SPEC.size, SPEC.level_shift, SCRATCH))
