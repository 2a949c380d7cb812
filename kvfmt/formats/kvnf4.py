"""kvnf4: NF4 codes against the block's largest magnitude, f16 scale, 4.25 bits per value. For K and V.

NF4 (Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E) takes quantiles of a
unit Gaussian, scaled to [-1, 1], with an exact zero. The levels are rounded to 1/127, so that
decode and dot are integer table look-ups.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from ..codec import Format, make_drivers
from ..jit import jit
from ..scalar import INPUT_RULES, UNIT, f32_to_f16_bits, load_scale, normalise, store_scale
from ..spec import BlockSpec, Field, Table
from . import _nibbles

LEVELS = (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
LEVEL_SHIFT = 7
ZERO_CODE = LEVELS.index(0)

#: amax -> scale, so that level 127 decodes to amax.
SCALE_UNIT = np.float32(2.0**LEVEL_SHIFT / 127)

# |xi| counts amax as 32767; a midpoint between integer levels is never an integer there, so no ties arise.
_thresholds_exact = [(a + b) / 2 * UNIT / 127 for a, b in zip(LEVELS, LEVELS[1:])]


def nf4_levels() -> np.ndarray:
    """The 16 levels of NF4, float64, ascending from -1 to 1."""
    # The paper's offset: the outermost quantile is the mean of the 15- and 16-level choices.
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    positive = norm.ppf(np.linspace(offset, 0.5, 9))[:-1]
    negative = -norm.ppf(np.linspace(offset, 0.5, 8))[:-1]
    levels = np.sort(np.concatenate([positive, [0.0], negative]))
    return levels / levels.max()


SPEC = BlockSpec(
    name="kvnf4",
    type_id=773,
    version=1,
    block=64,
    fields=(Field("d", "f16", 1, "scale"), _nibbles.FIELD),
    tables=(
        Table("levels", "i8", (16,), LEVELS, "NF4 levels in units of 1/127"),
        Table("thresholds", "i16", (15,), tuple(int(np.floor(t)) for t in _thresholds_exact), "midpoints of the levels"),
    ),
    level_shift=LEVEL_SHIFT,
    rounding=(
        *INPUT_RULES,
        "code = number of thresholds strictly below xi",
        "scale = f16_rne(min(amax * f32(128 / 127), 65504)); a scale of 0 gives the zero block",
        "the zero block has scale 0 and every code 7 (level 0)",
        "decode: f32(scale) * (level * 2**-7), exact",
    ),
    roles=("K", "V"),
    summary="NF4, absmax",
)

_levels = np.array(LEVELS, np.int32)
_thresholds = np.array(SPEC.table("thresholds").values, np.int32)


@jit
def encode_block(x, out, xi, codes, words):
    out[:2] = 0
    out[2:] = ZERO_CODE * 17
    amax = normalise(x, xi)
    scale = amax * SCALE_UNIT
    if f32_to_f16_bits(scale) == 0:
        return
    store_scale(scale, out)
    for i in range(64):
        code = np.uint8(0)
        for k in range(15):
            code += np.uint8(xi[i] > _thresholds[k])
        codes[i] = code
    _nibbles.pack(codes, out)


@jit
def decode_levels(data, levels):
    _nibbles.unpack(data, _levels, levels)
    return load_scale(data)


FORMAT = Format(SPEC, *make_drivers(encode_block, decode_levels, SPEC.block, SPEC.size, SPEC.level_shift))
