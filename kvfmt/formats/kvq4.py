"""kvq4: 4-bit Lloyd-Max codes, one f16 scale per 64 values, 4.25 bits per value. For K and V."""

from __future__ import annotations

import numpy as np

from ..codec import Format, make_drivers
from ..jit import jit
from ..scalar import load_scale
from ..spec import BlockSpec, Field
from . import _lloyd, _nibbles

LEVELS = (6, 18, 31, 44, 58, 75, 96, 127)
# Sixteen candidates come within 1 % of a search over 120 (unit Gaussian, block 64).
_grid = _lloyd.grid_thresholds(LEVELS, 16, 0.6, 1.5)

SPEC = BlockSpec(
    name="kvq4",
    type_id=772,
    version=1,
    block=_lloyd.BLOCK,
    fields=(Field("d", "f16", 1, "scale"), _nibbles.FIELD),
    tables=_lloyd.lloyd_tables(LEVELS, _grid),
    level_shift=_lloyd.LEVEL_SHIFT,
    rounding=_lloyd.ROUNDING,
    roles=("K", "V"),
    summary="4-bit Lloyd-Max",
)

_levels = np.array(SPEC.table("levels").values, np.int32)
_search = _lloyd.make_search(LEVELS, _grid)


@jit
def encode_block(x, out, xi, codes, words):
    out[:] = 0
    if _search(x, xi, codes, words, out):
        _nibbles.pack(codes, out)


@jit
def decode_levels(data, levels):
    _nibbles.unpack(data, _levels, levels)
    return load_scale(data)


FORMAT = Format(SPEC, *make_drivers(encode_block, decode_levels, SPEC.block, SPEC.size, SPEC.level_shift, _lloyd.SCRATCH))
