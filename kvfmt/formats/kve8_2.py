"""kve8_2: E8 lattice words of 16 bits for 8 values, one f16 scale per 64 values, 2.25 bits per value. Meant for V.

Version 2 stores the unbiased scale (see :mod:`._lloyd`); words, layout and decoder are those of version 1.
"""

from __future__ import annotations

from ..codec import Format, make_drivers
from ..spec import BlockSpec, Field
from . import _e8

# The classes of squared norm up to 10 (as QuIP#'s E8P has them) leave 29 rows. 28 + 1 of them as two 5/2 and
# all 3/2 are best: 0.0825 against 0.0832 with six 3/2 for the two 5/2 (unit Gaussian, levels fitted to each).
# 29 with five 3/2, as E8P has them, are no whole class: with the lattice's points for levels 0.0861, these 0.0863 (bench/lattice_study.py).
BOOK = _e8.Codebook(
    classes=(
        ((0, 0, 0, 0, 0, 0, 0, 0), (18, 18, 18, 18, 18, 18, 18, 18)),
        ((1, 0, 0, 0, 0, 0, 0, 0), (55, 18, 18, 18, 18, 18, 18, 18)),
        ((1, 1, 0, 0, 0, 0, 0, 0), (58, 58, 20, 20, 20, 20, 20, 20)),
        ((1, 1, 1, 0, 0, 0, 0, 0), (63, 63, 63, 21, 21, 21, 21, 21)),
        ((1, 1, 1, 1, 0, 0, 0, 0), (74, 74, 74, 74, 24, 24, 24, 24)),
        ((2, 0, 0, 0, 0, 0, 0, 0), (98, 22, 22, 22, 22, 22, 22, 22)),
        ((2, 1, 0, 0, 0, 0, 0, 0), (116, 70, 25, 25, 25, 25, 25, 25)),
        ((2, 2, 0, 0, 0, 0, 0, 0), (115, 115, 36, 36, 36, 36, 36, 36)),
        ((1, 1, 1, 1, 1, 1, 1, 1), (69, 69, 69, 69, 69, 69, 69, 69)),
    ),
    shift=11,
    rms_level=50.0,
)

SPEC = BlockSpec(
    name="kve8_2",
    type_id=774,
    version=2,
    block=_e8.BLOCK,
    fields=(
        Field("d", "f16", 1, "scale"),
        Field("rows", "u8", 8, "byte g: the magnitudes of values 8 g to 8 g + 7"),
        Field("signs", "u8", 8, "bit i % 8 of byte i / 8 is set where value i is negative before the shift"),
    ),
    tables=BOOK.tables(),
    level_shift=_e8.LEVEL_SHIFT,
    rounding=_e8.ROUNDING_UNBIASED,
    roles=("V", "K"),
    summary="E8, 16 bits for 8",
    unbiased=True,
)

encode_block, decode_levels, SCRATCH = _e8.make_kernels(BOOK, SPEC.tables, SPEC.unbiased)

FORMAT = Format(SPEC, *make_drivers(encode_block, decode_levels, SPEC.block, SPEC.size, SPEC.level_shift, SCRATCH))
