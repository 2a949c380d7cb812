"""kvq2: 2-bit Lloyd-Max codes, one f16 scale per 64 values, 2.25 bits per value. Meant for V.

Version 2 stores the unbiased scale (see :mod:`._lloyd`); codes, layout and decoder are those of version 1.
"""

from __future__ import annotations

import numpy as np

from ..codec import Format, make_drivers
from ..jit import jit
from ..scalar import load_scale
from ..spec import BlockSpec, Field
from . import _lloyd

LEVELS = (38, 127)
# Twelve candidates come within 0.1 % of a search over 120 (unit Gaussian, block 64).
_grid = _lloyd.grid_thresholds(LEVELS, 12, 0.45, 1.15)

SPEC = BlockSpec(
    name="kvq2",
    type_id=770,
    version=2,
    block=_lloyd.BLOCK,
    fields=(
        Field("d", "f16", 1, "scale"),
        Field("qs", "u8", 16, "codes: byte j holds values j, j+16, j+32, j+48, two bits each, lowest first"),
    ),
    tables=_lloyd.lloyd_tables(LEVELS, _grid),
    level_shift=_lloyd.LEVEL_SHIFT,
    rounding=_lloyd.ROUNDING_UNBIASED,
    roles=("V", "K"),
    summary="2-bit Lloyd-Max",
    unbiased=True,
)

_levels = np.array(SPEC.table("levels").values, np.int32)
_search = _lloyd.make_search(LEVELS, _grid, SPEC.unbiased)


@jit
def encode_block(x, out, xi, codes, words):
    out[:] = 0
    if not _search(x, xi, codes, words, out):
        return
    for j in range(16):
        out[2 + j] = codes[j] | (codes[j + 16] << 2) | (codes[j + 32] << 4) | (codes[j + 48] << 6)


@jit
def decode_levels(data, levels):
    for j in range(16):
        byte = data[2 + j]
        levels[j] = _levels[byte & 3]
        levels[j + 16] = _levels[(byte >> 2) & 3]
        levels[j + 32] = _levels[(byte >> 4) & 3]
        levels[j + 48] = _levels[byte >> 6]
    return load_scale(data)


FORMAT = Format(SPEC, *make_drivers(encode_block, decode_levels, SPEC.block, SPEC.size, SPEC.level_shift, _lloyd.SCRATCH))
