"""A second, slow implementation of the formats, written from the rules in the specs and sharing no code with them.

Python floats are float64. The float32 result of one multiplication or division is the float64 result rounded
to float32, because float64 has more than twice the bits (Figueroa 1995); rounding to f16 is numpy's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

BLOCK = 64
F16_MAX = 65504.0
SMALLEST_AMAX = 2.0**-26


def f32(value: float) -> float:
    return float(np.float32(value))


def f16_of_scale(value: float) -> float:
    return float(np.float16(np.float32(min(value, F16_MAX))))


def sanitised(x: Sequence[float]) -> list[float]:
    return [0.0 if math.isnan(v) else max(-F16_MAX, min(F16_MAX, v)) for v in map(float, x)]


def normalised(x: Sequence[float]) -> tuple[float, list[int]] | None:
    """(amax, integers), or None for the zero block. round() rounds ties to even."""
    values = sanitised(x)
    amax = max(abs(v) for v in values)
    if amax < SMALLEST_AMAX:
        return None
    inverse = f32(32767.0 / amax)
    return amax, [round(f32(v * inverse)) for v in values]


def scale_of(xi: Sequence[int], levels: Sequence[int], unbiased: bool, unit: float) -> float:
    """f16 scale of normalised values and the levels chosen for them; ``unit``: amax over 32767 levels, float32."""
    explained = sum(v * level for v, level in zip(xi, levels))
    if explained <= 0:
        return 0.0
    ratio = f32(f32(explained) / f32(sum(level**2 for level in levels)))
    if unbiased:
        ratio = min(f32(f32(sum(v**2 for v in xi)) / f32(explained)), 2 * ratio)
    return f16_of_scale(f32(ratio * unit))


def lloyd_codes(
    x: Sequence[float], levels: Sequence[int], grid: Sequence[Sequence[int]], unbiased: bool = False
) -> tuple[float, list[tuple[int, int]]] | None:
    """(f16 scale, (magnitude index, sign) of each value), or None for the zero block. ``levels``: the positive ones."""
    found = normalised(x)
    if found is None:
        return None
    amax, xi = found
    best = None
    for thresholds in grid:
        index = [sum(abs(v) > t for t in thresholds) for v in xi]
        explained = sum(abs(v) * levels[i] for v, i in zip(xi, index))
        energy = sum(levels[i] ** 2 for i in index)
        score = f32(f32(f32(explained) * f32(explained)) / f32(energy))
        if best is None or score > best[0]:
            best = score, index
    index = best[1]
    scale = scale_of([abs(v) for v in xi], [levels[i] for i in index], unbiased, f32(amax * f32(64 / 32767)))
    if scale == 0:
        return None
    return scale, [(i, int(v < 0)) for v, i in zip(xi, index)]


def _crumbs(values: Sequence[int]) -> bytes:
    """Byte j holds values j, j+16, j+32 and j+48, two bits each, lowest first."""
    return bytes(sum(values[j + 16 * k] << (2 * k) for k in range(4)) for j in range(16))


def _nibbles(values: Sequence[int]) -> bytes:
    return bytes(values[j] + 16 * values[j + 32] for j in range(32))


def _scale(value: float) -> bytes:
    return struct.pack("<e", value)


def encode_kvq2(x, levels, grid) -> bytes:
    found = lloyd_codes(x, levels, grid, unbiased=True)
    if found is None:
        return bytes(18)
    scale, codes = found
    return _scale(scale) + _crumbs([index + 2 * sign for index, sign in codes])


def encode_kvq3(x, levels, grid) -> bytes:
    found = lloyd_codes(x, levels, grid)
    if found is None:
        return bytes(26)
    scale, codes = found
    signs = sum(sign << i for i, (_, sign) in enumerate(codes))
    return _scale(scale) + _crumbs([index for index, _ in codes]) + signs.to_bytes(8, "little")


def encode_kvq4(x, levels, grid) -> bytes:
    found = lloyd_codes(x, levels, grid)
    if found is None:
        return bytes(34)
    scale, codes = found
    return _scale(scale) + _nibbles([index + 8 * sign for index, sign in codes])


def encode_kvnf4(x, thresholds) -> bytes:
    found = normalised(x)
    scale = 0.0 if found is None else f16_of_scale(f32(found[0] * f32(128 / 127)))
    if scale == 0:
        return bytes(2) + _nibbles([7] * BLOCK)
    return _scale(scale) + _nibbles([sum(v > t for t in thresholds) for v in found[1]])


def _read_crumbs(data: bytes) -> list[int]:
    return [data[i % 16] >> (2 * (i // 16)) & 3 for i in range(BLOCK)]


def _read_nibbles(data: bytes) -> list[int]:
    return [data[i % 32] >> (4 * (i // 32)) & 15 for i in range(BLOCK)]


def codes_of(name: str, data: bytes) -> list[int]:
    """The code of each value of a packed block."""
    if name == "kvq2":
        return _read_crumbs(data[2:18])
    if name == "kvq3":
        signs = int.from_bytes(data[18:26], "little")
        return [index + 4 * (signs >> i & 1) for i, index in enumerate(_read_crumbs(data[2:18]))]
    return _read_nibbles(data[2:34])


def decode(name: str, data: bytes, levels: Sequence[int], level_shift: int) -> list[float]:
    """``levels``: of every code."""
    (scale,) = struct.unpack("<e", data[:2])
    return [scale * (levels[code] * 2.0**-level_shift) for code in codes_of(name, data)]


def _unequal_parts(tables: dict) -> list[tuple[range, list[int], int, range]]:
    """(values, positive levels, weight, columns of the grid) of each codebook."""
    parts, column = [], 0
    for values, name, weight in zip((range(16), range(16, 32), range(32, 64)), ("fine", "middle", "coarse"), tables["weights"]):
        levels = tables[name][: len(tables[name]) // 2]
        parts.append((values, levels, weight, range(column, column + len(levels) - 1)))
        column += len(levels) - 1
    return parts


def _column_bits(tables: dict) -> list[tuple[int, int]]:
    """For each quarter, where its bits beyond the second begin in a column's field, and how many they are."""
    widths = [len(tables[name]).bit_length() - 3 for name in ("fine", "middle", "coarse", "coarse")]
    return [(sum(widths[:q]), width) for q, width in enumerate(widths)]


def encode_unequal(x: Sequence[float], tables: dict) -> bytes:
    """``tables``: those of the spec, nested lists by name."""
    field = sum(width for _, width in _column_bits(tables))
    size = 18 + 2 * field
    found = normalised(x)
    if found is None:
        return bytes(size)
    amax, xi = found
    parts = _unequal_parts(tables)
    best = None
    for thresholds in tables["grid"]:
        index, explained, energy = [], 0, 0
        for values, levels, weight, columns in parts:
            for i in values:
                index.append(sum(abs(xi[i]) > thresholds[k] for k in columns))
                explained += weight * abs(xi[i]) * levels[index[-1]]
                energy += weight * levels[index[-1]] ** 2
        score = f32(f32(f32(explained) * f32(explained)) / f32(energy))
        if best is None or score > best[0]:
            best = score, explained, energy, index
    _, explained, energy, index = best
    scale = f16_of_scale(f32(f32(f32(explained) / f32(energy)) * f32(amax * f32(32 / 32767))))
    if scale == 0:
        return bytes(size)
    half = {i: len(levels) for values, levels, _, _ in parts for i in values}
    codes = [k + half[i] * (v < 0) for i, (k, v) in enumerate(zip(index, xi))]
    fields = [sum((codes[j + 16 * q] >> 2) << shift for q, (shift, _) in enumerate(_column_bits(tables))) for j in range(16)]
    high = fields if field == 8 else [fields[j] + 16 * fields[j + 8] for j in range(8)]
    return _scale(scale) + _crumbs([c & 3 for c in codes]) + bytes(high)


def decode_unequal(data: bytes, tables: dict, level_shift: int) -> list[float]:
    (scale,) = struct.unpack("<e", data[:2])
    low, high = _read_crumbs(data[2:18]), data[18:]
    fields = high if len(high) == 16 else [b & 15 for b in high] + [b >> 4 for b in high]
    out = []
    for i in range(BLOCK):
        shift, width = _column_bits(tables)[i // 16]
        code = low[i] + 4 * (fields[i % 16] >> shift & (1 << width) - 1)
        out.append(scale * (tables[("fine", "middle", "coarse", "coarse")[i // 16]][code] * 2.0**-level_shift))
    return out


def _e8_row(z: Sequence[int], tables: dict) -> list[tuple[int, list[int], list[int]]]:
    """For an even and an odd row with its signs: (error * 64 of a level, magnitudes, signs) by trying every class."""
    order = sorted(range(len(z)), key=lambda i: (abs(z[i]), i), reverse=True)
    found: list = [None, None]
    for levels, digits in zip(tables["classes"], tables["digits"]):
        for flip in (False, True):
            magnitude, sign = [0] * len(z), [int(v < 0) for v in z]
            for i, level in zip(order, levels):
                magnitude[i] = level
            sign[order[-1]] ^= flip
            parity = (sum(digits) + sum(sign)) % 2
            error = sum((v - 8 * (-m if s else m)) ** 2 for v, m, s in zip(z, magnitude, sign))
            if found[parity] is None or error < found[parity][0]:
                found[parity] = error, magnitude, sign
    return found


def _e8_word(y: Sequence[int], tables: dict) -> tuple[int, list[int], list[int], int]:
    """(error, magnitudes, signs, direction) of eight values in eighths of a level."""
    dim = len(tables["classes"][0])
    best = None
    for direction in (1, -1):
        z = [v - 8 * direction * tables["shift"][0] for v in y]
        parts = [_e8_row(z[i : i + dim], tables) for i in range(0, 8, dim)]
        odd = int(direction < 0)
        natural = sum(v < 0 for v in z[:dim]) % 2
        # The rule names parities relative to the natural signs of the first row.
        for first in (natural, 1 - natural) if len(parts) == 2 else (odd,):
            chosen = [parts[0][first]] + ([parts[1][odd ^ first]] if len(parts) == 2 else [])
            error = sum(part[0] for part in chosen)
            if best is None or error < best[0]:
                best = error, sum((p[1] for p in chosen), []), sum((p[2] for p in chosen), []), direction
    return best


def encode_e8(x: Sequence[float], tables: dict, unbiased: bool) -> bytes:
    """``tables``: those of the spec, nested lists by name."""
    dim = len(tables["classes"][0])
    size = 2 + 64 // dim + 8
    found = normalised(x)
    if found is None:
        return bytes(size)
    amax, xi = found
    first = sum(sum(v * v for v in xi) // 64 > t for t in tables["start"])

    def attempt(j: int):
        y = [(v * tables["step"][j] + 2**15) // 2**16 for v in xi]
        words = [_e8_word(y[i : i + 8], tables) for i in range(0, 64, 8)]
        return f32(f32(sum(w[0] for w in words)) * f32(tables["weight"][j])), words

    best, words = attempt(first)
    for direction in (1, -1):
        improved = False
        j = first + direction
        while 0 <= j < len(tables["step"]):
            score, tried = attempt(j)
            if score >= best:
                break
            best, words, improved = score, tried, True
            j += direction
        if improved:
            break

    row_index = {tuple(m & 127 for m in row) + (int(row[0] < 0),): i for i, row in enumerate(tables["rows"])}
    odd_class = {tuple(sorted(lv, reverse=True)): sum(dg) % 2 for lv, dg in zip(tables["classes"], tables["digits"])}
    rows, signs, levels = [], [], []
    for _, magnitude, sign, direction in words:
        for i in range(0, 8, dim):
            part = tuple(magnitude[i : i + dim])
            rows.append(row_index[part + (odd_class[tuple(sorted(part, reverse=True))],)])
        signs.append(sum(s << i for i, s in enumerate(sign)))
        levels += [(-m if s else m) + direction * tables["shift"][0] for m, s in zip(magnitude, sign)]
    scale = scale_of(xi, levels, unbiased, f32(amax * f32(16 / 32767)))
    return _scale(scale) + bytes(rows) + bytes(signs) if scale else bytes(size)


def decode_e8(data: bytes, tables: dict, level_shift: int) -> list[float]:
    dim = len(tables["rows"][0])
    (scale,) = struct.unpack("<e", data[:2])
    rows, signs = data[2 : 2 + 64 // dim], data[-8:]
    out = []
    for g in range(8):
        chosen = [tables["rows"][r] for r in rows[g * 8 // dim : (g + 1) * 8 // dim]]
        odd = sum(row[0] < 0 for row in chosen) + bin(signs[g]).count("1")
        magnitude = [m % 128 for row in chosen for m in row]
        for i, m in enumerate(magnitude):
            level = (-m if signs[g] >> i & 1 else m) + (-1) ** odd * tables["shift"][0]
            out.append(scale * (level * 2.0**-level_shift))
    return out
