"""The only fp16, rounding and sanitising primitives of the reference.

Every format is written with these and nothing else, so that Python, C, SIMD and
CUDA have one short list of operations to agree on. No fastmath, no contraction:
each float32 operation rounds on its own (IEEE 754, round to nearest even).
"""

from __future__ import annotations

import numpy as np

from .jit import jit

#: Largest finite f16. Inputs saturate here, so that a block never holds an infinity.
F16_MAX = np.float32(65504.0)

#: Blocks are normalised so that their largest magnitude becomes this integer (int16 range).
UNIT = 32767

#: Below this largest magnitude (2**-26) every scale rounds to zero in f16.
AMAX_ZERO = np.float32(2.0**-26)


@jit
def f32_to_f16_bits(value):
    """float32 -> f16 bits (uint16), round to nearest even, subnormals kept, overflow to infinity."""
    bits = np.float32(value).view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    mag = bits & np.uint32(0x7FFFFFFF)
    if mag > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if mag >= np.uint32(0x477FF000):  # 65520: the first value that rounds to infinity
        return np.uint16(sign | np.uint32(0x7C00))
    if mag < np.uint32(0x38800000):  # below 2**-14: a subnormal f16, counted in units of 2**-24
        shift = np.uint32(126) - (mag >> np.uint32(23))
        if shift > np.uint32(24):
            return np.uint16(sign)
        mant = (mag & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
        half = np.uint32(1) << (shift - np.uint32(1))
        rest = mant & ((np.uint32(1) << shift) - np.uint32(1))
        out = mant >> shift
        if rest > half or (rest == half and (out & np.uint32(1))):
            out += np.uint32(1)
        return np.uint16(sign | out)
    out = (mag - np.uint32(0x38000000)) >> np.uint32(13)
    rest = mag & np.uint32(0x1FFF)
    if rest > np.uint32(0x1000) or (rest == np.uint32(0x1000) and (out & np.uint32(1))):
        out += np.uint32(1)
    return np.uint16(sign | out)


@jit
def f16_bits_to_f32(half):
    """f16 bits (uint16) -> float32, exact."""
    sign = np.uint32(half & np.uint16(0x8000)) << np.uint32(16)
    mag = np.uint32(half & np.uint16(0x7FFF))
    if mag >= np.uint32(0x7C00):
        return np.uint32(sign | np.uint32(0x7F800000) | ((mag & np.uint32(0x3FF)) << np.uint32(13))).view(np.float32)
    if mag >= np.uint32(0x400):
        return np.uint32(sign | ((mag << np.uint32(13)) + np.uint32(0x38000000))).view(np.float32)
    value = np.float32(mag) * np.float32(2.0**-24)
    if sign:
        return np.float32(-value)
    return value


@jit
def sanitise(value):
    """NaN becomes 0, everything beyond the f16 range saturates."""
    if not value == value:
        return np.float32(0.0)
    if value > F16_MAX:
        return F16_MAX
    if value < -F16_MAX:
        return np.float32(-F16_MAX)
    return value


@jit
def store_scale(scale, out):
    """Write a non-negative float32 scale as little-endian f16, saturating. Returns the f16 bits."""
    bits = f32_to_f16_bits(min(scale, F16_MAX))
    out[0] = np.uint8(bits & np.uint16(0xFF))
    out[1] = np.uint8(bits >> np.uint16(8))
    return bits


@jit
def scale_ratio(square, s, c, unbiased):
    """Scale of a block in units of amax and levels, float32, from exact sums over its normalised values xi and levels.

    ``square``: sum xi**2 as int64 (up to 36 bits), ``s``: sum xi level, ``c``: sum level**2, both int32. Least squares: s / c.
    Unbiased: square / s, but at most twice the least-squares scale, where the error reaches the block's own energy;
    blocks that get there have less than half of their energy explained. 0 if s is not positive.
    """
    if s <= 0:
        return np.float32(0.0)
    least = np.float32(s) / np.float32(c)
    if not unbiased:
        return least
    return min(np.float32(square) / np.float32(s), least + least)


@jit
def load_scale(block):
    """Read the little-endian f16 scale at the head of a block as float32."""
    return f16_bits_to_f32(np.uint16(block[0]) | (np.uint16(block[1]) << np.uint16(8)))


#: What ``sanitise``, ``normalise`` and the zero block mean, as every spec that uses them says it.
INPUT_RULES = (
    "input: NaN is 0, magnitudes above 65504 saturate",
    "normalise: xi = rint_even(x * (32767 / amax)) in float32; amax < 2**-26 gives the zero block",
)
ZERO_BLOCK_RULE = "the zero block is all zero bytes"


@jit
def normalise(x, xi):
    """Sanitise a block of float32 and scale it to int32 in [-32767, 32767].

    Returns the largest magnitude, or 0 if every scale would round to zero (then ``xi`` is not written).
    """
    amax = np.float32(0.0)
    for i in range(x.shape[0]):
        amax = max(amax, abs(sanitise(x[i])))
    if amax < AMAX_ZERO:
        return np.float32(0.0)
    inverse = np.float32(UNIT) / amax
    for i in range(x.shape[0]):
        xi[i] = np.int32(np.rint(sanitise(x[i]) * inverse))
    return amax
