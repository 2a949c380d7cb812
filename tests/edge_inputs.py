"""Blocks of 64 float32 values with names: what every encoder must agree on, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvfmt.codec import Format
from kvfmt.spec import BlockSpec

BLOCK = 64
F16_MAX = 65504.0


def named_blocks() -> dict[str, np.ndarray]:
    """Name -> float32 [64]."""
    ramp = np.arange(BLOCK, dtype=np.float32)
    rng = np.random.default_rng(20240817)
    normal = rng.standard_normal(BLOCK).astype(np.float32)

    def spike(value: float, background: float = 0.0) -> np.ndarray:
        block = np.full(BLOCK, background, np.float32)
        block[17] = value
        return block

    def with_values(values: dict[int, float]) -> np.ndarray:
        block = normal.copy()
        for index, value in values.items():
            block[index] = value
        return block

    blocks = {
        "zero": np.zeros(BLOCK),
        "negative_zero": np.full(BLOCK, -0.0),
        "ones": np.ones(BLOCK),
        "minus_ones": -np.ones(BLOCK),
        "alternating": np.where(ramp % 2 == 0, 1.0, -1.0),
        "ramp": ramp - 31.5,
        "one_huge_value": spike(60000.0, 1e-3),
        "one_huge_negative_value": spike(-60000.0, -1e-3),
        "single_spike": spike(1.0),
        "normal": normal,
        "normal_tiny": normal * np.float32(1e-6),
        "normal_large": normal * np.float32(1e4),
        "f16_max": np.full(BLOCK, F16_MAX),
        "f16_max_alternating": np.where(ramp % 2 == 0, F16_MAX, -F16_MAX),
        "beyond_f16": np.full(BLOCK, 1e30),
        "infinity": with_values({3: np.inf}),
        "negative_infinity": with_values({3: -np.inf}),
        "all_infinite": np.full(BLOCK, np.inf),
        "nan": with_values({5: np.nan}),
        "negative_nan": with_values({5: np.float32(np.uint32(0xFFC00001).view(np.float32))}),
        "all_nan": np.full(BLOCK, np.nan),
        "nan_and_infinity": with_values({5: np.nan, 6: np.inf, 7: -np.inf}),
        "f32_subnormals": np.full(BLOCK, 1e-40),
        "smallest_subnormal": spike(float(np.float32(1e-45))),
        "f16_subnormal_scale": normal * np.float32(2.0**-20),
        "scale_rounds_to_zero": normal * np.float32(2.0**-28),
        "just_below_zero_limit": spike(float(np.nextafter(np.float32(2.0**-26), np.float32(0)))),
        "at_zero_limit": spike(2.0**-26),
        "smallest_scale": np.full(BLOCK, 2.0**-24),
        "scale_tie_even": np.full(BLOCK, 1.0 + 2.0**-11),
        "scale_tie_odd": np.full(BLOCK, 1.0 + 3 * 2.0**-11),
        "threshold_ties": np.concatenate([[32767.0], np.arange(1, BLOCK) * 512.0]),
        "half_integers": np.concatenate([[32767.0], np.arange(BLOCK - 1) * 401.0 + 0.5]),
        "two_magnitudes": np.where(ramp < 32, 0.3, 1.0) * np.where(ramp % 3 == 0, -1, 1),
    }
    return {name: np.asarray(block, np.float32) for name, block in blocks.items()}


def edge_rows() -> np.ndarray:
    """float32 [n, 64], one row per named block."""
    return np.stack(list(named_blocks().values()))


def random_rows(n: int, seed: int) -> np.ndarray:
    """float32 [n, 64]: normal, Laplacian, Student-t and sparse rows over forty octaves of scale."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, BLOCK))
    rows[1::4] = rng.laplace(size=rows[1::4].shape)
    rows[2::4] = rng.standard_t(2, size=rows[2::4].shape)
    rows[3::4] *= rng.random(rows[3::4].shape) < 0.1
    return (rows * np.exp2(rng.uniform(-26, 14, (n, 1)))).astype(np.float32)


def structured_rows(n: int, seed: int) -> np.ndarray:
    """float32 [n, 64]: what caches hold beside noise. Outlier channels, rotations, offsets, steps, repeats."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, BLOCK))
    position = np.arange(n)[:, None]
    channel = np.arange(BLOCK)[None, :]
    outlier = np.where(channel % 31 == 7, 40.0, 1.0)
    kinds = [
        rows * outlier,
        np.sin(position / 10000.0 ** (channel / BLOCK) + channel),
        rows * 0.01 + 8.0 * np.cos(channel),
        np.round(rows * 4),
        np.repeat(rows[:, ::16], 16, axis=1),
        np.sort(rows, axis=1),
        np.where(rows > 0, 1.0, -0.25) + 1e-4 * rows,
    ]
    return np.stack([kinds[i % len(kinds)][i] for i in range(n)]).astype(np.float32)


@dataclass(frozen=True)
class _Codebook:
    """Which values of a block a codebook serves, its positive levels, its columns of the grid, and what its error counts."""

    values: slice
    levels: np.ndarray
    columns: slice
    weight: int = 1


def _codebooks(spec: BlockSpec) -> list[_Codebook]:
    """One for the whole block, or those of the formats with unequal bits."""
    tables = {t.name: np.array(t.values, np.float64) for t in spec.tables}
    if "fine" not in tables:
        half = next(t for t in spec.tables if t.dtype == "i16").shape[-1] + 1
        return [_Codebook(slice(0, BLOCK), tables["levels"][:half], slice(0, half - 1))]
    found, column = [], 0
    for (first, last), name, weight in zip(((0, 16), (16, 32), (32, 64)), ("fine", "middle", "coarse"), tables["weights"]):
        levels = tables[name][: len(tables[name]) // 2]
        found.append(_Codebook(slice(first, last), levels, slice(column, column + len(levels) - 1), int(weight)))
        column += len(levels) - 1
    return found


def _winners(magnitude: np.ndarray, books: list[_Codebook], grid: np.ndarray) -> np.ndarray:
    """Which row of the grid the search chooses for each block of integer magnitudes."""
    scores = []
    for thresholds in grid:
        explained = energy = 0
        for book in books:
            part = magnitude[:, book.values]
            chosen = book.levels[np.searchsorted(thresholds[book.columns], np.rint(part))]
            explained = explained + book.weight * (part * chosen).sum(axis=1)
            energy = energy + book.weight * (chosen**2).sum(axis=1)
        scores.append(explained**2 / energy)
    return np.argmax(scores, axis=0)


def lattice_rows(spec: BlockSpec) -> np.ndarray:
    """float32 [n, 64]: blocks on words of a lattice codebook, half-way between two words, and with equal magnitudes.

    On the words of one class, of any classes, at their midpoints (ties between words), at midpoints along one value
    (ties between signs, ranks or classes), constant magnitudes, and zeros in every place. At a few scales each.
    """
    tables = {t.name: np.array(t.values, np.int64).reshape(t.shape) for t in spec.tables}
    rng = np.random.default_rng(spec.type_id)
    packed = tables["rows"]
    dim, n = packed.shape[1], 240

    def words() -> np.ndarray:
        chosen = rng.integers(0, len(packed), (n, BLOCK // dim))
        magnitude = (packed & 127)[chosen].reshape(n, 8, 8)
        sign = rng.integers(0, 2, (n, 8, 8))
        odd = ((packed[:, 0] < 0)[chosen].reshape(n, 8, -1).sum(axis=2) + sign.sum(axis=2)) % 2
        return (magnitude * (1 - 2 * sign) + (1 - 2 * odd[..., None]) * tables["shift"][0]).reshape(n, BLOCK)

    one, two = words(), words()
    part = np.where(rng.random((n, BLOCK)) < 0.2, (one + two) / 2, one)
    same = np.repeat(rng.integers(1, 40, (n, 8)), 8, axis=1) * rng.choice([-1, 1], (n, BLOCK))
    gaps = np.where(rng.random((n, BLOCK)) < 0.3, 0, one)
    rows = np.concatenate([one, (one + two) / 2, part, same, gaps])
    rows = rows[np.abs(rows).max(axis=1) > 0]
    # A third of the rows so that their largest value normalises to itself, as in tie_rows; all once more at other scales.
    scaled = rows * np.exp2(rng.integers(-20, 8, (len(rows), 1)))
    rows[::3] = np.rint(rows[::3] * (32767 / np.abs(rows[::3]).max(axis=1, keepdims=True)))
    return np.concatenate([rows, scaled]).astype(np.float32)


@lru_cache
def tie_rows(spec: BlockSpec) -> np.ndarray:
    """float32 [n, 64]: blocks with values on, beside and half-way to every threshold that can decide a code.

    The largest magnitude is 32767, so that values normalise to themselves. Where thresholds belong to candidate
    scales, only blocks are kept in which that very candidate wins. Once more scaled by a power of two.
    Lattice formats have no thresholds: they get :func:`lattice_rows`.
    """
    if any(t.name == "classes" for t in spec.tables):
        return lattice_rows(spec)
    table = next(t for t in spec.tables if t.dtype == "i16")
    grid = np.array(table.values, np.float64).reshape(-1, table.shape[-1])
    rng = np.random.default_rng(spec.type_id)
    rows = np.concatenate([rng.standard_normal((800, BLOCK)), rng.uniform(-1, 1, (400, BLOCK)), rng.standard_t(3, (800, BLOCK))])
    rows = np.rint(rows * (32767 / np.abs(rows).max(axis=1, keepdims=True)))
    searched = len(grid) > 1
    books = _codebooks(spec)
    winner = _winners(np.abs(rows), books, grid) if searched else np.zeros(len(rows), int)
    top = np.abs(rows).argmax(axis=1)
    place_of = np.arange(BLOCK)
    for row, w, keep in zip(rows, winner, top):
        for book in books:
            thresholds = grid[w][book.columns]
            near = np.concatenate([thresholds[thresholds < 32767] + offset for offset in (-0.5, 0.0, 0.5, 1.0)])
            # Each value in the place whose own magnitude is next to it, so that the block changes little.
            for value in rng.permutation(near)[: 10 // len(books)]:
                inside = (place_of >= book.values.start) & (place_of < book.values.stop) & (place_of != keep)
                free = np.flatnonzero((row == np.rint(row)) & inside)
                place = free[np.abs(np.abs(row[free]) - abs(value)).argmin()]
                row[place] = np.copysign(value, row[place]) if searched else value
    if searched:
        still = _winners(np.abs(rows), books, grid) == winner
        rows, winner = rows[still], winner[still]
    some = np.concatenate([np.flatnonzero(winner == w)[:12] for w in range(len(grid))])
    return np.concatenate([rows[some], rows[some] * 2.0**-17]).astype(np.float32)


@lru_cache
def rounding_rows(fmt: Format) -> np.ndarray:
    """float32 [n, 64]: blocks in which the float32 rounding of the sum of squares decides the stored scale of an unbiased format.

    Rounded down, or up, in place of to nearest even, the scale would be another f16. Found among blocks of integers up to
    32767, which normalise to themselves, by moving one value a little: where that changes no code, the sums follow.
    """

    def levels_of(rows: np.ndarray) -> np.ndarray:
        data = fmt.encode(rows.astype(np.float32))
        data[:, :2] = (0, 0x3C)  # a scale of 1
        return np.rint(fmt.decode(data).astype(np.float64) * 2**fmt.spec.level_shift).astype(np.int64)

    rng = np.random.default_rng(fmt.spec.type_id)
    x = rng.standard_normal((1000, BLOCK))
    x = np.rint(x * (32767 / np.abs(x).max(axis=1, keepdims=True))).astype(np.int64)
    levels = levels_of(x)
    step = np.arange(-20, 21)
    moved = (x[:, :16, None] + step) * (np.abs(x[:, :16, None]) < 32000)  # never the largest
    square = (x * x).sum(axis=1)[:, None, None] - (x[:, :16] ** 2)[..., None] + moved**2
    s = (x * levels).sum(axis=1)[:, None, None] + (moved - x[:, :16, None]) * levels[:, :16, None]
    nearest = square.astype(np.float32)
    down = np.where(nearest.astype(np.float64) > square, np.nextafter(nearest, np.float32(0)), nearest)
    up = np.where(nearest.astype(np.float64) < square, np.nextafter(nearest, np.float32(np.inf)), nearest)
    unit = np.float32(32767) * np.float32(2.0**fmt.spec.level_shift / 32767)
    scales = [(q / s.astype(np.float32) * unit).astype(np.float16) for q in (nearest, down, up)]
    row, place, at = np.nonzero((moved != 0) & ((scales[1] != scales[0]) | (scales[2] != scales[0])))
    found = x[row]
    found[np.arange(len(row)), place] = moved[row, place, at]
    return found[(levels_of(found) == levels[row]).all(axis=1)].astype(np.float32)
