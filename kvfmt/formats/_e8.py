"""What the E8 formats share: the codebook, the exact nearest word, the scale search and the block kernel.

Lattice. E8 = D8 u (D8 + 1/2), the densest packing of eight dimensions (Conway and Sloane, Sphere
Packings, Lattices and Groups, ch. 4, section 8.1). As in QuIP# (Tseng et al. 2024, arXiv 2402.04396, section 4) a
word is a point of Z^8 + 1/2 moved by a quarter along the diagonal: a pattern of magnitudes, a sign for
each value, and the direction of the shift. Here the direction is not stored: points with an even sum
move up, points with an odd sum move down, which is again a coset of E8, and all eight signs are free.

Codebook. Magnitude patterns come in whole classes, that is with all their permutations. The best word is then
found exactly without a search through the words: for each direction, sort the magnitudes once and
lay them against each class's own, largest on largest (the rearrangement inequality); where the signs'
parity asks for the other direction, flip the sign of the smallest magnitude, which costs least in every class.

Levels. The magnitudes of a class are not n + 1/2 but the centroids of what falls on them (the second
condition of Lloyd 1982, IEEE Trans. IT 28(2)), on a unit Gaussian with a scale chosen per block, as integers: decode
is one look-up, one sign and one addition. Against the plain lattice points that is 0.15 dB (2 bits) and 0.6 dB (3 bits).

What was measured against it (``python -m bench.lattice_study``: unit Gaussian, block 64, scale searched, mean squared error
at each block's best scale, which its rounding to f16 does not change in these digits; ``bench/results/lattice_study.txt``
has what each costs):

===============================================================  ======  ======
codebook                                                         2 bits  3 bits
===============================================================  ======  ======
this one                                                         0.0829  0.0213
the same classes with levels n + 1/2, shift 1/4                  0.0863  0.0245
E8P, QuIP#'s                                                     0.0861
Voronoi code of ratio 4 or 8, offset 1/4, overload descends      0.0881  0.0233
ratio 4 or 8, overload shrinks to the region                     0.0983  0.0243
ratio 4 or 8, overload left to the scale                         0.1160  0.0265
ratio 4, offset 1/4, exact nearest word                          0.0881
two stages: 1 + 1 bits, E8P + 1 bit                              0.0968  0.0264
Lloyd-Max scalar codes (kvq2, kvq3)                              0.1110  0.0293
rate-distortion bound at the allocated bits                      0.0442  0.0110
===============================================================  ======  ======

Why not a nested (Voronoi) code, which needs no table: its region is that of q E8 and not a ball, and what falls outside must
be brought back. With every value at its exact nearest word it is still worse, and its decoder has to find a nearest point for eight
values (two roundings, two repairs of a parity), twelve times as long as E8P's look-up. Why not E8P: it is of the same size and
decoded alike, but its eighth sign must be computed, where eight free signs are a mask as they are; 29 of 56 patterns are no
whole class, so that its nearest word takes all 256 rows; and its points are the lattice's. Why not two stages: searched one
after the other they lose half of what E8 gains on scalar codes, or more, and take two look-ups. Centroids need a table, and
where there is one they cost nothing.

Scale. The block is normalised to integers and tried at neighbouring scales of a geometric grid, upwards from
the one that the mean square suggests, then downwards, as long as the error falls; errors are exact integers,
so no order of summation, no SIMD width and no compiler can change a byte.

Stored scale. kve8_2, meant for values, stores the unbiased scale for the words found, for the reason that
:mod:`kvfmt.formats._lloyd` gives: mean KLD of its values under f16 keys 0.109 to 0.074 (SmolLM2, a live chunk of 1,024
tokens). kve8_3, meant for keys, stores the least-squares one. The table above is at each block's best scale.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ..jit import jit
from ..scalar import INPUT_RULES, UNIT, ZERO_BLOCK_RULE, f32_to_f16_bits, load_scale, normalise, scale_ratio, store_scale
from ..spec import Table, flat

BLOCK = 64
GROUP = 8
N_GROUPS = BLOCK // GROUP
N_ROWS = 256
LEVEL_SHIFT = 4

#: Values are compared with levels in units of a level / 2**FINE.
FINE = 3

#: Candidate scales put the largest magnitude at so many levels, in steps of a tenth.
GRID_LOW, GRID_HIGH, GRID_STEP = 30.0, 420.0, 1.1

#: amax -> scale: the normalised block counts amax as 32767 and a level as 2**-4 of the scale.
SCALE_UNIT = np.float32(2.0**LEVEL_SHIFT / UNIT)

_CHOICE = (
    *INPUT_RULES,
    "first candidate = number of start thresholds strictly below floor(sum xi**2 / 64)",
    "at candidate j: y = floor((xi * step[j] + 2**15) / 2**16), in units of an eighth of a level",
    "for either direction, up first: z = y - direction * 8 * shift; |z| * 8 + position in the row is sorted downwards",
    "a class gains sum 2 |z| level - 8 sum level**2 with a natural sign each; with the smallest |z| flipped,"
    " 4 |z| level of the last less; for either parity the most wins, the first class of equals",
    "two rows a group: parities (even, the rest) are taken before (odd, the rest) if they gain no less",
    "the direction with the smaller sum z**2 - 8 gain wins, up of equals; z < 0 is negative",
    "candidate score = f32(sum of the groups' errors) * f32(weight[j]), smaller is better",
    "climb: candidates upwards while the score falls strictly; if the first of them did not, downwards likewise",
)
_DECODE = (
    ZERO_BLOCK_RULE,
    "decode: f32(scale) * (level * 2**-4), exact; level = sign * magnitude + direction * shift;"
    " the direction is up where an even number of signs and odd rows is set",
)

ROUNDING = (
    *_CHOICE,
    "scale = f16_rne(min(f32(S) / f32(C) * (amax * f32(16 / 32767)), 65504)) with S = max(0, sum xi level),"
    " C = sum level**2; a scale of 0 gives the zero block",
    *_DECODE,
)

ROUNDING_UNBIASED = (
    *_CHOICE,
    "scale = f16_rne(min(r * (amax * f32(16 / 32767)), 65504)) with r = min(f32(Q) / f32(S), 2 * (f32(S) / f32(C))),"
    " S = sum xi level, C = sum level**2, Q = sum xi**2 exact and rounded once; r = 0 unless S > 0;"
    " a scale of 0 gives the zero block",
    *_DECODE,
)


@dataclass(frozen=True)
class Codebook:
    """Classes of magnitude patterns.

    ``classes``: (digits, levels) each, both descending; ``digits`` n stand for n + 1/2 in the lattice, ``levels``
    are the magnitudes that stand for them. ``shift``: the quarter, in levels. ``rms_level``: where the root mean
    square of a Gaussian block lies at its best scale, in levels.
    """

    classes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    shift: int
    rms_level: float

    @property
    def dim(self) -> int:
        """Values that one row serves."""
        return len(self.classes[0][0])

    @property
    def base(self) -> int:
        """One more than the largest digit."""
        return 1 + max(digits[0] for digits, _ in self.classes)

    def rows(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(digits, levels) of all 256 patterns: class by class, each in descending order of its digits."""
        members: dict[tuple[int, ...], list[tuple[int, ...]]] = {digits: [] for digits, _ in self.classes}
        for pattern in itertools.product(range(self.base - 1, -1, -1), repeat=self.dim):
            digits = tuple(sorted(pattern, reverse=True))
            if digits in members:
                members[digits].append(pattern)
        made = []
        for digits, levels in self.classes:
            level_of = dict(zip(digits, levels))
            made += [(pattern, tuple(level_of[n] for n in pattern)) for pattern in members[digits]]
        return made

    def tables(self) -> tuple[Table, ...]:
        rows, dim, base = self.rows(), self.dim, self.base
        row_of = [0] * base**dim
        for index, (digits, _) in enumerate(rows):
            row_of[sum(n * base**i for i, n in enumerate(digits))] = index
        # Bit 7 beside a magnitude of seven bits: one look-up gives both.
        packed = [[level - 128 * (sum(digits) % 2) for level in levels] for digits, levels in rows]
        n = len(self.classes)
        amax_level = GRID_LOW * GRID_STEP ** np.arange(1 + np.ceil(np.log(GRID_HIGH / GRID_LOW) / np.log(GRID_STEP)))
        step = np.rint(amax_level[::-1] * 2**FINE * 2**16 / UNIT)
        start = np.floor((self.rms_level * 2**FINE * 2**16) ** 2 / (step[1:] * step[:-1]))
        weight = np.rint(2**23 * (step[-1] / step) ** 2)
        return (
            Table("rows", "i8", (len(rows), dim), flat(packed), "magnitudes of each row, less 128 where the row is odd"),
            Table("classes", "i8", (n, dim), flat(levels for _, levels in self.classes), "magnitudes of a class, descending"),
            Table("digits", "i8", (n, dim), flat(digits for digits, _ in self.classes), "what they stand for: n of n + 1/2"),
            Table("norms", "i32", (n,), tuple(8 * sum(v * v for v in lv) for _, lv in self.classes), "8 sum level**2 of a class"),
            Table("base", "i8", (1,), (base,), "of the digits: one more than the largest"),
            Table("row_of", "u8", (len(row_of),), tuple(row_of), "row of the digits as a number in that base, the first lowest"),
            Table("shift", "i8", (1,), (self.shift,), "the quarter along the diagonal"),
            Table("step", "i32", (len(step),), tuple(int(v) for v in step), "candidate scales: 1/8 levels per unit, times 2**16"),
            Table("weight", "i32", (len(step),), tuple(int(v) for v in weight), "their squares, relative: what an error weighs"),
            Table("start", "i32", (len(start),), tuple(int(v) for v in np.minimum(start, 2**31 - 1)), "mean squares at which the first candidate changes"),
        )


def make_kernels(book: Codebook, spec_tables: tuple[Table, ...], unbiased: bool = False):
    """(encode_block, decode_levels, scratch) of a codebook and its tables, for :func:`kvfmt.codec.make_drivers`;
    ``unbiased`` is that of the spec.

    A block is the scale, a row index for each ``dim`` values, and a byte of signs for each group of eight.
    """
    dim, base, shift = book.dim, book.base, book.shift
    parts = GROUP // dim  # rows a group
    n_rows = BLOCK // dim
    tables = {t.name: np.array(t.values, np.int32).reshape(t.shape) for t in spec_tables}
    classes, digits, norms = tables["classes"], tables["digits"], tables["norms"]
    odd_class = digits.sum(axis=1).astype(np.int32) & 1
    row_of, step, start = tables["row_of"], tables["step"], tables["start"]
    weight = tables["weight"].astype(np.float32)
    magnitudes, odd_row = tables["rows"] & 127, (tables["rows"][:, 0] < 0).astype(np.int32)
    n_classes = len(classes)
    fine_shift = np.int32(shift << FINE)
    powers = (base ** np.arange(dim)).astype(np.int32)

    # words: y, the word chosen for each group in this candidate and in the best, and room for one group.
    # A chosen row is its value positions by rank, then class and flip; a group adds its direction.
    PART = dim + 2
    CHOICE = N_GROUPS * (parts * PART + 1)
    Y, NOW, BEST, TRY = 0, BLOCK, BLOCK + CHOICE, BLOCK + 2 * CHOICE
    SCRATCH = TRY + 2 * (parts * PART + 1)

    @jit
    def place(y, first, t, order):
        """Sorts a row's positions by |z|, downwards; returns the parity of its signs and sum z**2."""
        negative = np.int32(0)
        square = np.int32(0)
        for i in range(dim):
            z = y[first + i] - t * fine_shift
            negative ^= np.int32(z < 0)
            square += z * z
            key = (abs(z) << 3) | i
            j = i
            while j > 0 and order[j - 1] < key:
                order[j] = order[j - 1]
                j -= 1
            order[j] = key
        return negative, square

    @jit
    def best_classes(order, gains, picks):
        """For each parity relative to the natural signs: the most that a class gains, and 2 * class + flipped."""
        for parity in range(2):
            gains[parity] = -(1 << 30)
        for k in range(n_classes):
            gain = np.int32(-norms[k])
            for i in range(dim):
                gain += 2 * (order[i] >> 3) * classes[k, i]
            flipped = gain - 4 * (order[dim - 1] >> 3) * classes[k, dim - 1]
            p = odd_class[k]
            if gain > gains[p]:
                gains[p] = gain
                picks[p] = 2 * k
            if flipped > gains[1 - p]:
                gains[1 - p] = flipped
                picks[1 - p] = 2 * k + 1

    @jit
    def nearest(y, group, out, trial, gains, picks):
        """The best word of a group into ``out``: each row's ranking, class and flip; then the direction. Returns its error."""
        least = np.int32(0)
        for d in range(2):
            t = 1 - 2 * d
            odd = d
            error = np.int32(0)
            for h in range(parts):
                negative, square = place(y, group * GROUP + h * dim, t, trial[h * PART :])
                best_classes(trial[h * PART :], gains[2 * h :], picks[2 * h :])
                odd ^= negative
                error += square
            if parts == 1:
                p = odd
            else:
                p = 0
                if gains[1] + gains[2 + (1 ^ odd)] > gains[0] + gains[2 + odd]:
                    p = 1
            for h in range(parts):
                q = p if h == 0 else p ^ odd
                error -= 8 * gains[2 * h + q]
                trial[h * PART + dim] = picks[2 * h + q]
            if d == 0 or error < least:
                least = error
                for i in range(parts * PART):
                    out[i] = trial[i]
                out[parts * PART] = t
        return least

    @jit
    def quantize(xi, j, words, gains, picks, chosen):
        """Words for a block at candidate scale j into ``words[chosen:]``; returns the score."""
        for i in range(BLOCK):
            words[Y + i] = (xi[i] * step[j] + 32768) >> 16
        total = np.int32(0)
        for g in range(N_GROUPS):
            total += nearest(words, g, words[chosen + g * (parts * PART + 1) :], words[TRY:], gains, picks)
        return np.float32(total) * weight[j]

    @jit
    def encode_block(x, out, xi, codes, words):
        out[:] = 0
        amax = normalise(x, xi)
        if amax == 0:
            return
        square = np.int64(0)
        for i in range(BLOCK):
            square += np.int64(xi[i]) * np.int64(xi[i])
        mean_square = square >> 6
        first = 0
        for k in range(start.shape[0]):
            first += mean_square > start[k]
        gains = np.empty(4, np.int32)
        picks = np.empty(4, np.int32)
        best = quantize(xi, first, words, gains, picks, BEST)
        winner = first
        for direction in (1, -1):
            j = first + direction
            while 0 <= j < step.shape[0]:
                score = quantize(xi, j, words, gains, picks, NOW)
                if not score < best:
                    break
                best = score
                winner = j
                words[BEST : BEST + CHOICE] = words[NOW : NOW + CHOICE]
                j += direction
            if winner != first:
                break

        for i in range(BLOCK):
            words[Y + i] = (xi[i] * step[winner] + 32768) >> 16
        s = np.int32(0)
        c = np.int32(0)
        for g in range(N_GROUPS):
            word = words[BEST + g * (parts * PART + 1) :]
            t = word[parts * PART]
            for h in range(parts):
                pick = word[h * PART + dim]
                index = np.int32(0)
                for rank in range(dim):
                    at = h * dim + (word[h * PART + rank] & 7)
                    i = g * GROUP + at
                    negative = words[Y + i] - t * fine_shift < 0
                    if rank == dim - 1 and pick & 1:
                        negative = not negative
                    level = classes[pick >> 1, rank]
                    index += digits[pick >> 1, rank] * powers[at - h * dim]
                    if negative:
                        level = -level
                        out[2 + n_rows + g] |= np.uint8(1 << at)
                    level += t * shift
                    s += xi[i] * level
                    c += level * level
                out[2 + g * parts + h] = row_of[index]
        scale = scale_ratio(square, s, c, unbiased) * (amax * SCALE_UNIT)
        if f32_to_f16_bits(scale) == 0:
            out[:] = 0
            return
        store_scale(scale, out)

    @jit
    def decode_levels(data, levels):
        for g in range(N_GROUPS):
            signs = np.int32(data[2 + n_rows + g])
            odd = signs ^ (signs >> 4)
            odd ^= odd >> 2
            odd ^= odd >> 1
            for h in range(parts):
                odd ^= odd_row[data[2 + g * parts + h]]
            t = 1 - 2 * (odd & 1)
            for i in range(GROUP):
                magnitude = magnitudes[data[2 + g * parts + i // dim], i % dim]
                levels[g * GROUP + i] = magnitude * (1 - 2 * ((signs >> i) & 1)) + t * shift
        return load_scale(data)

    return encode_block, decode_levels, SCRATCH
