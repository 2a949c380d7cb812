"""What the formats with unequal bits share: codebooks, the search for their common scale, the block kernel.

A block of 64 values is four quarters of 16 with a falling number of bits, and one scale for all. Which value is worth how
many bits is not the block's to know: a profile orders the channels of a head by importance and brings each quarter to about
unit variance, so that each is quantized as a unit Gaussian (kvfmt/geometry.py). The last two quarters have equal bits, so there
are three codebooks: fine, middle and coarse.

Codebooks. Lloyd-Max quantizers of a unit Gaussian (kvfmt/formats/_lloyd.py) in integers, 29 to a standard deviation: of
all factors that keep the levels within seven bits, that one's rounding costs least (0.7 % of the 5-bit distortion, 4.4 %
of the 6-bit one). A code is a magnitude index with the sign as its top bit.

Scale. It is found as in _lloyd, over a grid relative to the largest magnitude and in exact integers, but a quarter's
squared error counts by its weight, the inverse of its quantizer's distortion: a channel with more bits has them because
queries look at it. In KLD of SmolLM2 with 3-bit keys: 0.031, against 0.039 with equal weights. The grid is dense, four
percent a step, from where the fine quarter's top level meets the largest magnitude to where the coarse quarter's does, because
sixteen fine values make the error jagged; below, it is there for outliers. Against steps of two percent everywhere that costs 0.2 % (kvt3) and 1.3 % (kvt4) of
the weighted error of a Gaussian, and no more where quarters differ in size, values have heavy tails or one is an outlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codec import Format, make_drivers
from ..jit import jit
from ..scalar import INPUT_RULES, UNIT, ZERO_BLOCK_RULE, f32_to_f16_bits, load_scale, normalise, store_scale
from ..spec import BlockSpec, Field, Table, flat

BLOCK = 64
QUARTER = 16
LEVEL_SHIFT = 5

#: A standard deviation in levels.
SIGMA_LEVELS = 29

#: Candidate scales: a standard deviation's share of the largest magnitude.
DENSE_LOW, DENSE_HIGH, DENSE_STEP = 0.24, 0.68, 1.04
SPARSE_STEP, SPARSE_COUNT = 1.4, 8

PARTS = ("fine", "middle", "coarse")

#: amax -> scale: the normalised block counts amax as 32767 and a level as 2**-5 of the scale.
SCALE_UNIT = np.float32(2.0**LEVEL_SHIFT / UNIT)

ROUNDING = (
    *INPUT_RULES,
    "values 0..15 take fine codes, 16..31 middle codes, 32..63 coarse codes",
    "magnitude index = number of thresholds of its codebook strictly below |xi|; the sign bit is xi < 0",
    "candidate score = f32(S) * f32(S) / f32(C) with S = sum weight |xi| level, C = sum weight level**2;"
    " the first maximum wins",
    "scale = f16_rne(min(f32(S) / f32(C) * (amax * f32(32 / 32767)), 65504)); a scale of 0 gives the zero block",
    ZERO_BLOCK_RULE,
    "decode: f32(scale) * (level * 2**-5), exact",
)


@dataclass(frozen=True)
class Allocation:
    """``bits`` of the four quarters, falling, the last two equal; for the three codebooks their positive ``levels`` and the
    ``weights`` of a squared error. ``shifts``: where each quarter's bits beyond the second lie in a column's field of ``qh``."""

    bits: tuple[int, int, int, int]
    levels: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    weights: tuple[int, int, int]

    def __post_init__(self) -> None:
        if self.bits[2] != self.bits[3] or self.high_bits not in (4, 8):
            raise ValueError(f"no block for bits {self.bits}")
        if tuple(len(part) for part in self.levels) != tuple(2 ** (b - 1) for b in self.bits[:3]):
            raise ValueError(f"the codebooks do not have {self.bits} bits")

    @property
    def high_bits(self) -> int:
        """Bits of a column, which is one value of each quarter, beyond the two lowest of each code."""
        return sum(b - 2 for b in self.bits)

    @property
    def shifts(self) -> tuple[int, ...]:
        return tuple(sum(b - 2 for b in self.bits[:q]) for q in range(4))

    def grid(self) -> np.ndarray:
        """Integer thresholds, int64 [candidates, those of fine, middle and coarse]: midpoints of levels in units of amax / 32767."""
        count = 1 + int(np.log(DENSE_HIGH / DENSE_LOW) / np.log(DENSE_STEP))
        dense = DENSE_LOW * DENSE_STEP ** np.arange(count)
        sparse = DENSE_LOW / SPARSE_STEP ** np.arange(1, SPARSE_COUNT + 1)
        ratios = np.concatenate([sparse[::-1], dense])
        positive = [np.array(part, np.float64) for part in self.levels]
        midpoints = np.concatenate([(part[1:] + part[:-1]) / 2 for part in positive])
        return np.minimum(np.floor(np.outer(ratios * UNIT / SIGMA_LEVELS, midpoints)), UNIT).astype(np.int64)


def make_format(name: str, type_id: int, allocation: Allocation, summary: str) -> Format:
    """The format of an allocation."""
    fields = (
        Field("d", "f16", 1, "scale"),
        Field("qs", "u8", 16, "low code bits: byte j holds values j, j+16, j+32, j+48, two bits each, lowest first"),
        {
            4: Field("qh", "u8", 8, "the other code bits: byte j holds those of values j, j+16 in four bits, then of j+8, j+24"),
            8: Field("qh", "u8", 16, "the other code bits: byte j holds those of values j, j+16, j+32, j+48, lowest first"),
        }[allocation.high_bits],
    )
    grid = allocation.grid()
    codebooks = tuple(
        Table(part, "i8", (2 * len(levels),), (*levels, *(-v for v in levels)), f"level of each {part} code; the top code bit is the sign")
        for part, levels in zip(PARTS, allocation.levels)
    )
    spec = BlockSpec(
        name=name,
        type_id=type_id,
        version=1,
        block=BLOCK,
        fields=fields,
        tables=(
            *codebooks,
            Table("weights", "i8", (3,), allocation.weights, "what a squared error counts in fine, middle and coarse values"),
            Table("grid", "i16", grid.shape, flat(grid), "magnitude thresholds of each candidate scale: fine, middle, coarse"),
        ),
        level_shift=LEVEL_SHIFT,
        rounding=ROUNDING,
        roles=("K",),
        summary=summary,
        needs_profile=True,
        groups=(QUARTER,) * 4,
    )
    encode_block, decode_levels, scratch = _make_kernels(spec, allocation)
    return Format(spec, *make_drivers(encode_block, decode_levels, BLOCK, spec.size, LEVEL_SHIFT, scratch))


def _make_kernels(spec: BlockSpec, allocation: Allocation):
    """(encode_block, decode_levels, scratch) for :func:`kvfmt.codec.make_drivers`."""
    grid = np.array(spec.table("grid").values, np.int32).reshape(spec.table("grid").shape)
    positive = [np.array(part, np.int32) for part in allocation.levels]
    fine, middle, coarse = (np.array(spec.table(part).values, np.int32) for part in PARTS)
    weights = np.array(allocation.weights, np.int64)
    bits = np.array(allocation.bits, np.int32)
    shifts = np.array(allocation.shifts, np.int32)
    column_bits = allocation.high_bits
    first = np.concatenate([[0], np.cumsum([len(part) - 1 for part in positive])])  # threshold of each part
    steps = np.concatenate([np.diff(part) for part in positive]).astype(np.int32)
    square_steps = np.concatenate([np.diff(np.square(part)) for part in positive]).astype(np.int32)
    lowest = np.array([part[0] for part in positive], np.int32)

    # As in _lloyd: a candidate's sums need, for each threshold, how many magnitudes lie above and what they add up to. The
    # values of each part are sorted once into the bins between the thresholds of all candidates. Bins of the parts follow
    # one another; words[b]: how many magnitudes lie in bin b or above, words[n_bins + b]: their sum.
    bounds = [np.unique(grid[:, first[p] : first[p + 1]]) for p in range(3)]
    start = np.concatenate([[0], np.cumsum([len(part) + 1 for part in bounds])])
    n_bins = int(start[3])
    bin_of = np.stack([start[p] + np.searchsorted(bounds[p], np.arange(UNIT + 1)) for p in range(3)]).astype(np.int16)
    bin_above = np.concatenate(
        [start[p] + 1 + np.searchsorted(bounds[p], grid[:, first[p] : first[p + 1]]) for p in range(3)], axis=1
    ).astype(np.int16)

    @jit
    def search(xi, words):
        """(winner, S, C)"""
        words[: 2 * n_bins] = 0
        for i in range(BLOCK):
            mag = abs(xi[i])
            b = bin_of[min(i // QUARTER, 2), mag]
            words[b] += 1
            words[n_bins + b] += mag
        for p in range(3):
            for b in range(start[p + 1] - 1, start[p], -1):
                words[b - 1] += words[b]
                words[n_bins + b - 1] += words[n_bins + b]
        best = np.float32(-1.0)
        winner = 0
        best_s = np.float32(0.0)
        best_c = np.float32(1.0)
        for j in range(grid.shape[0]):
            s = np.int64(0)
            c = np.int64(0)
            for p in range(3):
                part_s = np.int32(lowest[p] * words[n_bins + start[p]])
                part_c = np.int32(lowest[p] * lowest[p] * words[start[p]])
                for k in range(first[p], first[p + 1]):
                    b = bin_above[j, k]
                    part_s += steps[k] * words[n_bins + b]
                    part_c += square_steps[k] * words[b]
                s += weights[p] * part_s
                c += weights[p] * part_c
            score = np.float32(s) * np.float32(s) / np.float32(c)
            if score > best:
                best = score
                winner = j
                best_s = np.float32(s)
                best_c = np.float32(c)
        return winner, best_s, best_c

    @jit
    def encode_block(x, out, xi, codes, words):
        out[:] = 0
        amax = normalise(x, xi)
        if amax == 0:
            return
        winner, s, c = search(xi, words)
        scale = s / c * (amax * SCALE_UNIT)
        if f32_to_f16_bits(scale) == 0:
            return
        store_scale(scale, out)
        for i in range(BLOCK):
            q = i // QUARTER
            column = i % QUARTER
            part = min(q, 2)
            code = np.int32(xi[i] < 0) << (bits[q] - 1)
            for k in range(first[part], first[part + 1]):
                code += np.int32(abs(xi[i]) > grid[winner, k])
            out[2 + column] |= np.uint8((code & 3) << (2 * q))
            high = (code >> 2) << shifts[q]
            if column_bits == 8:
                out[18 + column] |= np.uint8(high)
            else:
                out[18 + column % 8] |= np.uint8(high << (column // 8 * 4))

    @jit
    def decode_levels(data, levels):
        for i in range(BLOCK):
            q = i // QUARTER
            column = i % QUARTER
            if column_bits == 8:
                high = np.int32(data[18 + column])
            else:
                high = np.int32(data[18 + column % 8]) >> (column // 8 * 4)
            code = (np.int32(data[2 + column]) >> (2 * q)) & 3
            code |= ((high >> shifts[q]) & ((1 << (bits[q] - 2)) - 1)) << 2
            if q == 0:
                levels[i] = fine[code]
            elif q == 1:
                levels[i] = middle[code]
            else:
                levels[i] = coarse[code]
        return load_scale(data)

    return encode_block, decode_levels, 2 * n_bins
