"""What the Lloyd-Max formats share: the codebook, the search grid and the block kernel.

Codebook. The Lloyd-Max quantizer of a unit Gaussian (Lloyd 1982, IEEE Trans. IT 28(2);
Max 1960, IRE Trans. IT 6(1)) with 2**bits levels, symmetric, scaled so that its top level
is 127 and rounded to integers: decode and dot are then integer table look-ups. Rounding
costs less than 0.2 % of the distortion. A code is a magnitude index with the sign as its
top bit, so code 0 is the smallest positive level.

Scale. Minimising a block's squared error over codes *and* scale together is a search over
the scale; for given codes c with levels l the best scale is sum(x l) / sum(l l) and what
it explains is sum(x l)**2 / sum(l l). The block is normalised to integers, a fixed grid of
candidate scales relative to its largest magnitude is tried with precomputed integer
thresholds, and the candidate that explains most wins, the first of equals. All sums are
exact integers: no order of summation, no SIMD width and no compiler can change a byte.

Stored scale. The least-squares scale shrinks: <x, decoded> is (1 - D) <x, x>, D the relative error, 0.11 at 2 bits.
Attention averages values over many tokens, which averages the noise away and the shrinkage not. Formats meant for
values therefore store sum(x x) / sum(x l) for the same codes (``unbiased``): the single error grows to D / (1 - D), and
the mean KLD of 2-bit values under f16 keys falls from 0.155 to 0.105 (kvq2, SmolLM2, a live chunk of 1,024 tokens).
Softmax does not average keys: the same scale raises kvq3's from 0.159 to 0.209, so formats meant for keys keep theirs.
Blocks of which the codes explain less than half get twice the least-squares scale: beyond it the error would be
larger than the block (a lone spike among zeros would give each zero three tenths of the spike).
"""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from ..jit import jit
from ..scalar import INPUT_RULES, UNIT, ZERO_BLOCK_RULE, f32_to_f16_bits, normalise, scale_ratio, store_scale
from ..spec import Table, flat

TOP_LEVEL = 127
BLOCK = 64
LEVEL_SHIFT = 6

_CHOICE = (
    *INPUT_RULES,
    "magnitude index = number of thresholds strictly below |xi|; the sign bit is xi < 0",
    "candidate score = f32(S) * f32(S) / f32(C) with S = sum |xi| level, C = sum level**2; the first maximum wins",
)
_DECODE = (
    ZERO_BLOCK_RULE,
    "decode: f32(scale) * (level * 2**-6), exact",
)

ROUNDING = (
    *_CHOICE,
    "scale = f16_rne(min(f32(S) / f32(C) * (amax * f32(64 / 32767)), 65504)); a scale of 0 gives the zero block",
    *_DECODE,
)

ROUNDING_UNBIASED = (
    *_CHOICE,
    "scale = f16_rne(min(r * (amax * f32(64 / 32767)), 65504)) with r = min(f32(Q) / f32(S), 2 * (f32(S) / f32(C))),"
    " Q = sum xi**2 exact and rounded once; a scale of 0 gives the zero block",
    *_DECODE,
)

#: Most bins that the thresholds of a grid may make; a search needs two int32 words for each.
BINS = 256
SCRATCH = 2 * BINS

#: amax -> scale: the normalised block counts amax as 32767 and a level as 2**-6 of the scale.
SCALE_UNIT = np.float32(2.0**LEVEL_SHIFT / UNIT)


def lloyd_max_gaussian(bits: int) -> np.ndarray:
    """Positive levels, float64 [2**(bits-1)], of the Lloyd-Max quantizer of a unit Gaussian."""
    n = 2**bits
    levels = norm.ppf((np.arange(n) + 0.5) / n)
    for _ in range(100_000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        updated = -np.diff(norm.pdf(edges)) / np.diff(norm.cdf(edges))
        if np.abs(updated - levels).max() < 1e-13:
            break
        levels = updated
    return levels[n // 2 :]


def integer_levels(bits: int) -> tuple[int, ...]:
    """Positive levels as integers, the top one being 127."""
    levels = lloyd_max_gaussian(bits)
    return tuple(int(v) for v in np.rint(levels * TOP_LEVEL / levels[-1]))


def grid_thresholds(levels: tuple[int, ...], candidates: int, low: float, high: float) -> np.ndarray:
    """Integer thresholds, int64 [candidates, len(levels) - 1].

    Candidate j puts the top level at r_j * amax, r_j geometric from ``low`` to ``high``;
    its thresholds are the midpoints between neighbouring levels in units of amax / 32767.
    """
    ratios = np.geomspace(low, high, candidates)
    positive = np.asarray(levels, np.float64)
    midpoints = (positive[1:] + positive[:-1]) / 2
    return np.minimum(np.floor(np.outer(ratios * UNIT / TOP_LEVEL, midpoints)), UNIT).astype(np.int64)


def lloyd_tables(levels: tuple[int, ...], thresholds: np.ndarray) -> tuple[Table, Table]:
    """Signed levels indexed by code, and the search grid."""
    signed = tuple(levels) + tuple(-v for v in levels)
    return (
        Table("levels", "i8", (len(signed),), signed, "level of each code; the top code bit is the sign"),
        Table("grid", "i16", thresholds.shape, flat(thresholds), "magnitude thresholds of each candidate scale"),
    )


def make_search(levels: tuple[int, ...], thresholds: np.ndarray, unbiased: bool = False):
    """The search for one codebook (its positive levels) and grid; ``unbiased`` is that of the spec.

    search(x f32[64], xi i32[64], codes u8[64], words i32[SCRATCH], out u8[size]) chooses the codes of a block and
    writes its scale into ``out``; it returns False for the zero block.

    A candidate's sums need, for each of its thresholds, only how many magnitudes lie above and what they add up to.
    So the block is sorted once into the bins between the thresholds of all candidates.
    """
    half = len(levels)
    bounds = np.unique(thresholds)
    n_bins = len(bounds) + 1
    assert n_bins <= BINS
    bin_of = np.searchsorted(bounds, np.arange(UNIT + 1)).astype(np.uint8)  # bounds strictly below a magnitude
    bin_above = np.searchsorted(bounds, thresholds) + 1
    grid = thresholds.astype(np.int32)
    lowest = np.int32(levels[0])
    steps = np.diff(levels).astype(np.int32)
    square_steps = np.diff(np.square(levels)).astype(np.int32)

    @jit
    def search(x, xi, codes, words, out):
        amax = normalise(x, xi)
        if amax == 0:
            return False
        # words[b]: how many magnitudes lie in bin b or above; words[BINS + b]: their sum
        for b in range(n_bins):
            words[b] = 0
            words[BINS + b] = 0
        square = np.int64(0)
        for i in range(BLOCK):
            mag = abs(xi[i])
            square += np.int64(mag) * np.int64(mag)
            b = np.int64(bin_of[mag])
            words[b] += 1
            words[BINS + b] += mag
        for b in range(n_bins - 1, 0, -1):
            words[b - 1] += words[b]
            words[BINS + b - 1] += words[BINS + b]
        best = np.float32(-1.0)
        winner = 0
        best_s = np.int32(0)
        best_c = np.int32(1)
        for j in range(grid.shape[0]):
            s = np.int32(lowest * words[BINS])
            c = np.int32(lowest * lowest * BLOCK)
            for k in range(half - 1):
                b = bin_above[j, k]
                s = np.int32(s + steps[k] * words[BINS + b])
                c = np.int32(c + square_steps[k] * words[b])
            score = np.float32(s) * np.float32(s) / np.float32(c)
            if score > best:
                best = score
                winner = j
                best_s = s
                best_c = c
        scale = scale_ratio(square, best_s, best_c, unbiased) * (amax * SCALE_UNIT)
        if f32_to_f16_bits(scale) == 0:
            return False
        store_scale(scale, out)
        for i in range(BLOCK):
            codes[i] = np.uint8(half if xi[i] < 0 else 0)
        for k in range(half - 1):
            threshold = grid[winner, k]
            for i in range(BLOCK):
                codes[i] += np.uint8(abs(xi[i]) > threshold)
        return True

    return search
