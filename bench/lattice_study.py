"""What other E8 codes would give in place of the formats' codebook, and what they cost: ``python -m bench.lattice_study``.

All store R bits a value and one f16 scale per 64, and are measured on the same unit Gaussian:

- ``Voronoi``: the points of E8 in the Voronoi region of q E8 (Conway and Sloane 1983, A fast encoding method for lattice
  codes and quantizers, IEEE Trans. IT 29(6)), q = 2**R, with or without an offset. No table: a point is eight digits base q, decoding
  subtracts the nearest point of q E8. A value outside the region is overloaded, which is left to the scale (``wrap``), brought to the
  last word on its way to the origin (``shrink``), improved from there by steps of a root (``descend``), or searched for (``exact``).
- ``E8P``: the 2-bit codebook of QuIP# (Tseng et al. 2024, arXiv 2402.04396, section 4): 256 rows of magnitudes, seven
  signs and the direction of the quarter; the eighth sign follows.
- ``residual``: a code of two stages, the second at a smaller scale for what the first left, searched one after the other as there: E8P and one bit
  (the origin, the 240 roots and 15 points of norm 4), or twice one bit.

The formats stand beside them, once as they are and once with the lattice's own points for levels.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Optional

import numba
import numpy as np
import typer
from numba import njit
from rich import box
from rich.console import Console
from rich.table import Table

from bench.encode_token import BUDGET_MS
from bench.trellis import BLOCK, SCALE_BITS, SEED, TOKEN_VALUES, numbers
from kvfmt import registry
from kvfmt.build.console import console, progress
from kvfmt.build.files import write_whole
from kvfmt.codec import Format, make_drivers
from kvfmt.distortion import decibel_above_bound
from kvfmt.errors import KvfmtError
from kvfmt.formats import _e8, kve8_2, kve8_3
from kvfmt.scalar import f16_bits_to_f32, f32_to_f16_bits

DIM = 8
GROUPS = BLOCK // DIM
#: A code is tried at these multiples of the scale that is best for all blocks alike; the formats climb in the same steps.
SCALES = (_e8.GRID_STEP ** np.arange(-4, 5)).astype(np.float32)
#: Where that one is looked for, in units of a block's root mean square; and the second stage's scale, in units of the first's.
WHOLE_SCALES = np.geomspace(0.3, 3, 47).astype(np.float32)
RATIOS = np.geomspace(0.25, 0.75, 12).astype(np.float32)
#: So few that a turn is rarely interrupted, and so many that a call costs nothing beside it: of encoding, of decoding.
TIMED_BLOCKS = 32
DECODED_BLOCKS = 1024
#: Bisections on the way to the origin.
HALVINGS = 8


class Code(NamedTuple):
    """Tables of a code, float32; empty where it has none. ``rows`` [8, n]: magnitudes n + 1/2 of E8P, ``odd`` int32 [n] their parities;
    ``words`` [stages, 8, m]: points that are searched one by one, each stage for what is left; ``q``: the ratio of a Voronoi code, or 0;
    ``offset`` [8]: what is added to its points; ``halvings`` and ``roots`` [n, 8]: how overload is dealt with."""

    rows: np.ndarray
    odd: np.ndarray
    words: np.ndarray
    q: int
    offset: np.ndarray
    halvings: int
    roots: np.ndarray

    @property
    def bits(self) -> float:
        """A value."""
        stages, _, m = self.words.shape
        n = self.q**DIM if self.q else (self.rows.shape[1] << DIM or 1) * m**stages
        return float(np.log2(n)) / DIM

    @property
    def table_bytes(self) -> int:
        """What a decoder looks up, at a byte a magnitude or coordinate; stages that differ in scale share one."""
        return self.rows.size + self.words[:1].size


def _none(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def e8_points(norm: int) -> np.ndarray:
    """float32 [n, 8]: the points of E8 with a squared length of at most ``norm``, the shortest first."""
    reach = int(norm**0.5)
    whole = _within(range(-reach, reach + 1), norm)
    half = _within([n + 0.5 for n in range(-reach - 1, reach + 1)], norm)
    points = np.concatenate([whole, half])
    points = points[points.sum(axis=1) % 2 == 0]
    return np.ascontiguousarray(points[np.argsort(np.square(points).sum(axis=1), kind="stable")])


def _within(values, norm: float) -> np.ndarray:
    """All vectors of eight of the values within the norm, coordinate by coordinate, so that few are made in vain."""
    values = np.array(list(values), np.float32)
    found = _none(1, 0)
    for _ in range(DIM):
        found = np.concatenate([np.repeat(found, len(values), axis=0), np.tile(values, len(found))[:, None]], axis=1)
        found = found[np.square(found).sum(axis=1) <= norm]
    return found


def voronoi(q: int, offset: float = 0.0, halvings: int = HALVINGS, descend: bool = True) -> Code:
    """Ratio ``q`` with ``offset`` on every coordinate; without halvings an overloaded value takes what its digits decode to."""
    roots = e8_points(2)[1:] if descend else _none(0, DIM)
    return Code(_none(DIM, 0), np.zeros(0, np.int32), _none(0, DIM, 1), q, np.full(DIM, offset, np.float32), halvings, roots)


def tables(rows: np.ndarray, *stages: np.ndarray) -> Code:
    """``rows`` [n, 8] of digits, or of none; ``stages`` [m, 8] each, of as many points."""
    words = np.stack([np.ascontiguousarray(s.T) for s in stages]) if stages else _none(0, DIM, 1)
    odd = rows.astype(np.int32).sum(axis=1) & 1
    return Code(np.ascontiguousarray(rows.T + np.float32(0.5)).astype(np.float32), odd.astype(np.int32), words, 0, _none(DIM), 0, _none(0, DIM))


def e8p_rows() -> np.ndarray:
    """Digits n of n + 1/2, float32 [256, 8]: all rows of squared norm up to 10, and 29 of the 56 that have five 3/2."""
    rows = [r for r in itertools.product(range(3), repeat=DIM) if sum((n + 0.5) ** 2 for n in r) <= 10]
    more = [r for r in itertools.product((1, 0), repeat=DIM) if sum(r) == 5]
    return np.array(rows + more[: 256 - len(rows)], np.float32)


def one_bit() -> np.ndarray:
    """float32 [256, 8]: the origin, the roots, and the first 15 points of norm 4."""
    return e8_points(4)[:256]


def all_words(code: Code) -> np.ndarray:
    """float32 [n, 8]: what the indices 0, 1, ... of a code decode to."""
    return decode(np.arange(round(2 ** (code.bits * DIM)), dtype=np.int64).reshape(-1, 1), np.ones(1, np.float32), code)


@njit(cache=True)
def nearest_d8(y, out):
    """The nearest point of D8 to ``y`` [8] into ``out``: round, and where the sum is odd take back the worst rounding. Returns the error."""
    total = 0
    worst = np.float32(-1)
    at = 0
    error = np.float32(0)
    for i in range(DIM):
        r = np.floor(y[i] + np.float32(0.5))
        d = y[i] - r
        out[i] = r
        total += np.int64(r)
        error += d * d
        if abs(d) > worst:
            worst = abs(d)
            at = i
    if total & 1:
        out[at] += np.float32(1) if y[at] > out[at] else np.float32(-1)
        error += 1 - 2 * worst
    return error


@njit(cache=True)
def nearest_e8(y, out):
    """The nearest point of E8 to ``y`` float32 [8] into ``out``: the better of D8 and D8 + 1/2, the first of equals. Returns the error."""
    moved = np.empty(DIM, np.float32)
    trial = np.empty(DIM, np.float32)
    for i in range(DIM):
        moved[i] = y[i] - np.float32(0.5)
    error = nearest_d8(y, out)
    other = nearest_d8(moved, trial)
    if other < error:
        error = other
        for i in range(DIM):
            out[i] = trial[i] + np.float32(0.5)
    return error


@njit(cache=True)
def point_index(point, q):
    """Digits of a point of E8 base q, the first highest, in the basis 2 e1, e2 - e1, ..., e7 - e6, (1/2, ..., 1/2)."""
    last = np.int64(2 * point[DIM - 1])
    index = last % q
    place = q
    digit = np.int64(0)
    for i in range(DIM - 2, -1, -1):
        digit += np.int64(point[i] - np.float32(0.5) * last)
        index += (digit // 2 if i == 0 else digit) % q * place
        place *= q
    return index


@njit(cache=True)
def leader(index, q, offset, out):
    """The word of an index into ``out``: of its points in E8 + offset, modulo q E8, the one that the nearest point of q E8 leaves."""
    digits = np.empty(DIM, np.int64)
    for i in range(DIM - 1, -1, -1):
        digits[i] = index % q
        index //= q
    half = np.float32(0.5) * digits[DIM - 1]
    out[0] = 2 * digits[0] - digits[1] + half
    for i in range(1, DIM - 1):
        out[i] = digits[i] - (digits[i + 1] if i < DIM - 2 else 0) + half
    out[DIM - 1] = half
    for i in range(DIM):
        out[i] += offset[i]
    scaled = np.empty(DIM, np.float32)
    coarse = np.empty(DIM, np.float32)
    for i in range(DIM):
        scaled[i] = out[i] / q
    nearest_e8(scaled, coarse)
    for i in range(DIM):
        out[i] -= q * coarse[i]


@njit(cache=True)
def word_at(y, code, point, out):
    """The nearest point to ``y`` into ``point``, and the word that its digits stand for into ``out``: (index, whether they are the same)."""
    moved = np.empty(DIM, np.float32)
    for i in range(DIM):
        moved[i] = y[i] - code.offset[i]
    nearest_e8(moved, point)
    index = point_index(point, code.q)
    leader(index, code.q, code.offset, out)
    same = True
    for i in range(DIM):
        same &= point[i] + code.offset[i] == out[i]
    return index, same


@njit(cache=True)
def nearest_voronoi(y, code, out):
    """A word of a Voronoi code near ``y`` into ``out``, the nearest if there is no overload; returns its index."""
    point = np.empty(DIM, np.float32)
    index, inside = word_at(y, code, point, out)
    if inside or code.halvings == 0:
        return index
    part = np.empty(DIM, np.float32)
    trial = np.empty(DIM, np.float32)
    index = np.int64(0)
    leader(index, code.q, code.offset, out)
    low = np.float32(0)
    high = np.float32(1)
    for _ in range(code.halvings):
        middle = np.float32(0.5) * (low + high)
        for i in range(DIM):
            part[i] = y[i] * middle
        found, inside = word_at(part, code, point, trial)
        if inside:
            low = middle
            index = found
            for i in range(DIM):
                out[i] = trial[i]
        else:
            high = middle
    moving = code.roots.shape[0] > 0
    least = np.float32(0)
    for i in range(DIM):
        d = y[i] - out[i]
        least += d * d
    while moving:
        moving = False
        for i in range(DIM):
            part[i] = out[i]
        for k in range(code.roots.shape[0]):
            error = np.float32(0)
            for i in range(DIM):
                point[i] = part[i] + code.roots[k, i]
                d = y[i] - point[i]
                error += d * d
            if error < least:
                for i in range(DIM):
                    point[i] -= code.offset[i]
                found = point_index(point, code.q)
                leader(found, code.q, code.offset, trial)
                inside = True
                for i in range(DIM):
                    inside &= point[i] + code.offset[i] == trial[i]
                if inside:
                    moving = True
                    least = error
                    index = found
                    for i in range(DIM):
                        out[i] = trial[i]
    return index


@njit(cache=True)
def nearest_row(y, code, out, room):
    """The nearest of E8P's words to ``y`` into ``out``, by all rows in both directions; returns its index. ``room`` float32 [2, n]."""
    n = code.rows.shape[1]
    gain, lost = room[0], room[1]
    best = np.float32(-np.inf)
    index = np.int64(0)
    for down in range(2):
        shift = np.float32(-0.25) if down else np.float32(0.25)
        signs = np.int64(0)
        parity = 0
        for k in range(n):
            gain[k] = 0
            lost[k] = np.float32(np.inf)
        square = np.float32(0)
        for i in range(DIM):
            z = y[i] - shift
            square += z * z
            if z < 0:
                signs |= 1 << i
                parity ^= 1
                z = -z
            row = code.rows[i]
            for k in range(n):
                both = 2 * z * row[k]
                gain[k] += both - row[k] * row[k]
                lost[k] = min(lost[k], both)
        pick = -1
        for k in range(n):
            got = gain[k] - (2 * lost[k] if parity != code.odd[k] else np.float32(0)) - square
            if got > best:
                best = got
                pick = k
        if pick >= 0:
            if parity != code.odd[pick]:
                at = 0
                for i in range(DIM):
                    if abs(y[i] - shift) * code.rows[i, pick] < abs(y[at] - shift) * code.rows[at, pick]:
                        at = i
                signs ^= 1 << at
            index = (pick << 8) | (signs & 127) << 1 | down
    row_word(index, code, out)
    return index


@njit(cache=True)
def row_word(index, code, out):
    """The word of an index of 16 bits: the row, seven signs, the direction. The eighth sign makes the sum even."""
    row = index >> 8
    signs = (index >> 1) & 127
    odd = signs ^ (signs >> 4)
    odd ^= odd >> 2
    odd ^= odd >> 1
    signs |= ((odd & 1) ^ code.odd[row]) << 7
    shift = np.float32(-0.25) if index & 1 else np.float32(0.25)
    for i in range(DIM):
        magnitude = code.rows[i, row]
        out[i] = (-magnitude if (signs >> i) & 1 else magnitude) + shift


@njit(cache=True)
def nearest_table(y, words, room):
    """Which of ``words`` [8, m] is nearest to ``y``, the first of equals."""
    m = words.shape[1]
    error = room[0]
    for k in range(m):
        error[k] = 0
    for i in range(DIM):
        row = words[i]
        v = y[i]
        for k in range(m):
            d = v - row[k]
            error[k] += d * d
    return np.int64(np.argmin(error[:m]))


@njit(cache=True)
def quantize(y, code, out, room):
    """The word that a code takes for ``y`` float32 [8] into ``out``; returns its index."""
    if code.q:
        return nearest_voronoi(y, code, out)
    index = np.int64(0)
    rest = y.copy()
    out[:] = 0
    if code.rows.shape[1]:
        index = nearest_row(y, code, out, room)
        for i in range(DIM):
            rest[i] -= out[i]
    for stage in range(code.words.shape[0]):
        pick = nearest_table(rest, code.words[stage], room)
        index = index * code.words.shape[2] + pick
        for i in range(DIM):
            v = code.words[stage, i, pick]
            out[i] += v
            rest[i] -= v
    return index


@njit(cache=True)
def encode(blocks, scales, code, stored, chosen):
    """Each of ``blocks`` float32 [n, 64] at every one of ``scales`` (relative to its root mean square), the scale then refitted by least
    squares and rounded to f16; the least error is kept. Fills ``stored`` int64 [n, 8], indices, and ``chosen`` float32 [n]."""
    room = np.empty((2, max(1, max(code.rows.shape[1], code.words.shape[2]))), np.float32)
    y = np.empty(DIM, np.float32)
    word = np.empty(DIM, np.float32)
    indices = np.empty(GROUPS, np.int64)
    for b in range(blocks.shape[0]):
        x = blocks[b]
        square = np.float32(0)
        for i in range(BLOCK):
            square += x[i] * x[i]
        rms = np.sqrt(square / np.float32(BLOCK))
        most = np.float32(-1)
        for j in range(scales.shape[0]):
            inverse = np.float32(1) / max(rms * scales[j], np.float32(1e-20))
            xv = np.float32(0)
            vv = np.float32(1e-20)
            for g in range(GROUPS):
                for i in range(DIM):
                    y[i] = x[g * DIM + i] * inverse
                indices[g] = quantize(y, code, word, room)
                for i in range(DIM):
                    xv += x[g * DIM + i] * word[i]
                    vv += word[i] * word[i]
            explained = xv * xv / vv if xv > 0 else np.float32(0)
            if explained > most:
                most = explained
                chosen[b] = f16_bits_to_f32(f32_to_f16_bits(max(xv, np.float32(0)) / vv))
                stored[b] = indices


@njit(cache=True)
def decode(stored, scales, code):
    """float32 [n, 8 * groups] from the stored indices and scales alone; one scale serves all if there is but one."""
    out = np.empty((stored.shape[0], stored.shape[1] * DIM), np.float32)
    word = np.empty(DIM, np.float32)
    stages, m = code.words.shape[0], code.words.shape[2]
    for b in range(stored.shape[0]):
        scale = scales[b % scales.shape[0]]
        for g in range(stored.shape[1]):
            index = stored[b, g]
            if code.q:
                leader(index, code.q, code.offset, word)
            else:
                word[:] = 0
                if code.rows.shape[1]:
                    row_word(index // m**stages, code, word)
                for stage in range(stages):
                    pick = index // m ** (stages - 1 - stage) % m
                    for i in range(DIM):
                        word[i] += code.words[stage, i, pick]
            for i in range(DIM):
                out[b, g * DIM + i] = scale * word[i]
    return out


def encoded(code: Code, blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices int64 [n, 8], scales float32 [n]) of float32 [n, 64]."""
    stored, chosen = np.zeros((len(blocks), GROUPS), np.int64), np.zeros(len(blocks), np.float32)
    encode(blocks, scales, code, stored, chosen)
    return stored, chosen


def errors(blocks: np.ndarray, out: np.ndarray, scales: np.ndarray) -> tuple[float, float]:
    """Mean squared error of ``out`` float32 [n, 64], decoded with ``scales`` float32 [n]: with each block at its least-squares scale
    instead, and with that one rounded to f16. A scale that a format stores for another reason is no matter of its code."""
    x, v = blocks.astype(np.float64), out.astype(np.float64)
    energy = np.square(v).sum(axis=1)
    best = np.divide(np.maximum((x * v).sum(axis=1), 0), energy, out=np.zeros(len(x)), where=energy > 0)
    rounded = (best * scales).astype(np.float16) / np.where(scales > 0, scales, 1).astype(np.float64)
    return float(np.mean(np.square(best[:, None] * v - x))), float(np.mean(np.square(rounded[:, None] * v - x)))


def distortion(code: Code, blocks: np.ndarray, scales: np.ndarray) -> float:
    """Mean squared error of encode + decode."""
    stored, chosen = encoded(code, blocks, scales)
    return errors(blocks, decode(stored, chosen, code), chosen)[0]


def best_scale(code: Code, blocks: np.ndarray) -> np.float32:
    """The one of WHOLE_SCALES that is best for all blocks alike."""
    return min(WHOLE_SCALES, key=lambda s: distortion(code, blocks, np.array([s])))


def with_ratio(blocks: np.ndarray, rows: np.ndarray, first: list[np.ndarray], last: np.ndarray) -> Code:
    """A code of two stages whose second scale is the best of RATIOS, each at its own best first scale."""
    codes = [tables(rows, *first, last * r) for r in RATIOS]
    return min(codes, key=lambda code: distortion(code, blocks, np.array([best_scale(code, blocks[:16])])))


def of_lattice_points(fmt: Format, book: _e8.Codebook) -> Format:
    """The format with levels at the lattice's own points n + 1/2 and a shift of 1/4, as dense as a level's seven bits allow."""
    unit = 4 * (127 // (4 * book.base - 1))
    # Without centroids the outermost points are too far out for what falls on them: a block lies lower at its best scale.
    rms = 0.75 * book.rms_level * unit * (book.classes[0][0][0] + 0.5) / book.classes[0][1][0]
    classes = tuple((digits, tuple(unit * (2 * n + 1) // 2 for n in digits)) for digits, _ in book.classes)
    plain = replace(book, classes=classes, shift=unit // 4, rms_level=rms)
    spec = replace(fmt.spec, tables=plain.tables())
    kernels = _e8.make_kernels(plain, spec.tables, spec.unbiased)
    return Format(spec, *make_drivers(*kernels[:2], spec.block, spec.size, spec.level_shift, kernels[2]))


@dataclass(frozen=True)
class Row:
    """A measured code. ``tried``: scales a block; ``codes`` and ``stored``: mean squared error as of :func:`errors`;
    ``encode`` ns a block, ``decode`` ns a value, one core, Numba; ``table``: bytes that a decoder looks up."""

    name: str
    ours: bool
    tried: str
    codes: float
    stored: float
    encode: float
    decode: float
    table: int

def least(call: Callable[[], object], seconds: float) -> float:
    """Nanoseconds, the least of all turns within the time, at least two: whatever else the machine does only adds to it."""
    found, ends = [], time.perf_counter() + seconds
    while len(found) < 2 or time.perf_counter() < ends:
        began = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - began)
    return min(found)


def format_row(name: str, fmt: Format, table: int, blocks: np.ndarray, seconds: float) -> Row:
    packed = fmt.encode(blocks)
    scales = packed[:, :2].copy().view(np.float16)[:, 0].astype(np.float32)
    some, short = blocks[:TIMED_BLOCKS], packed[:DECODED_BLOCKS]
    encode_ns, decode_ns = least(lambda: fmt.encode(some), seconds), least(lambda: fmt.decode(short), seconds)
    tried = "climb" if table else "grid"
    return Row(name, True, tried, *errors(blocks, fmt.decode(packed), scales), encode_ns / len(some), decode_ns / (len(short) * BLOCK), table)


def code_row(name: str, code: Code, train: np.ndarray, blocks: np.ndarray, seconds: float) -> Row:
    slow = code.table_bytes > 2**16  # an exhaustive search through that many words
    scales = best_scale(code, train[: max(1, len(train) // 8)] if slow else train) * SCALES
    stored, chosen = encoded(code, blocks, scales)
    some, short = blocks[:TIMED_BLOCKS], stored[:DECODED_BLOCKS]
    encode_ns, decode_ns = least(lambda: encoded(code, some, scales), seconds), least(lambda: decode(short, chosen, code), seconds)
    mse = errors(blocks, decode(stored, chosen, code), chosen)
    return Row(name, False, str(len(scales)), *mse, encode_ns / len(some), decode_ns / (len(short) * BLOCK), code.table_bytes)


def contenders(bits: int, train: np.ndarray) -> dict[str, Callable[[], Code]]:
    """Makers of the codes of a rate, by name."""
    q, none = 1 << bits, _none(0, DIM)
    found: dict[str, Callable[[], Code]] = {
        f"Voronoi q={q}, wrap": lambda: voronoi(q, halvings=0, descend=False),
        f"Voronoi q={q}, shrink": lambda: voronoi(q, descend=False),
        f"Voronoi q={q}, descend": lambda: voronoi(q),
        f"Voronoi q={q} + 1/4, descend": lambda: voronoi(q, 0.25),
    }
    if bits == 2:
        found[f"Voronoi q={q} + 1/4, exact"] = lambda: tables(none, all_words(voronoi(q, 0.25)))
        found["E8P"] = lambda: tables(e8p_rows())
        found["residual, 1 + 1"] = lambda: with_ratio(train, none, [one_bit()], one_bit())
    else:
        found["residual, E8P + 1"] = lambda: with_ratio(train, e8p_rows(), [], one_bit())
    return found


BOOKS = {2: ("kvq2", "kve8_2", kve8_2.BOOK), 3: ("kvq3", "kve8_3", kve8_3.BOOK)}


def study(bits: int, train: np.ndarray, blocks: np.ndarray, seconds: float) -> list[Row]:
    """Rows of a rate: the formats, then the others. Raises KvfmtError for a rate that no E8 format has."""
    if bits not in BOOKS:
        raise KvfmtError(f"there is no E8 format of {bits} bits", f"Ask for {' or '.join(map(str, BOOKS))}.")
    scalar, name, book = BOOKS[bits]
    table = len(book.rows()) * book.dim
    fmt = registry.get(name)
    makers = contenders(bits, train)
    rows = []
    with progress(f"{bits} bits", 3 + len(makers)) as update:
        rows.append(format_row(name, fmt, table, blocks, seconds))
        rows.append(format_row(f"{name}, lattice points", of_lattice_points(fmt, book), table, blocks, seconds))
        rows.append(format_row(f"{scalar} (scalar)", registry.get(scalar), 0, blocks, seconds))
        update(3, 3 + len(makers))
        for title, make in makers.items():
            rows.append(code_row(title, make(), train, blocks, seconds))
            update(len(rows), 3 + len(makers))
    return rows


def verdict(bits: int, rows: list[Row]) -> str:
    """One paragraph: how the format does against the best of the others."""
    ours = rows[0]
    others = [r for r in rows if not r.ours]
    best = min(others, key=lambda r: r.codes)
    gain = 10 * np.log10(best.codes / ours.codes)
    ahead = f"{gain:.2f} dB better than" if gain > 0 else f"{-gain:.2f} dB WORSE than"
    return (
        f"{bits} bits: {ours.name} is {ahead} the best of the others, {best.name}, which takes {best.encode / ours.encode:.1f} times "
        f"as long to encode and {best.decode / ours.decode:.1f} times as long to decode."
    )


def report(found: dict[int, list[Row]]) -> str:
    """Tables and verdicts in 100 columns."""
    printed = Console(file=io.StringIO(), width=100, highlight=False, color_system=None)
    for b, rows in found.items():
        table = Table(title=f"{b} bits and an f16 scale per {BLOCK}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("code", no_wrap=True)
        for heading in ("scales", "MSE", "in f16", "dB", "µs/block", "decode ns", "table B"):
            table.add_column(heading, justify="right", no_wrap=True)
        for r in rows:
            db = decibel_above_bound(r.codes, b + SCALE_BITS / BLOCK)
            table.add_row(
                r.name, r.tried, f"{r.codes:.4f}", f"{r.stored:.4f}", f"{db:.2f}", f"{r.encode / 1000:,.1f}", f"{r.decode:.1f}", f"{r.table:,}"
            )
        printed.print(table)
    printed.print(
        f"MSE: on a unit Gaussian, each block at its least-squares scale; in f16: with that scale rounded. dB: above the bound at the allocated bits. "
        f"scales: tried a block. µs/block and decode ns (a value): Numba, one core, the least of many turns; the formats take less in C, where "
        f"a token of {TOKEN_VALUES // BLOCK:,} blocks may take {BUDGET_MS:g} ms. table: what a decoder looks up, at a byte a coordinate."
    )
    for b, rows in found.items():
        printed.print(verdict(b, rows))
    return "\n".join(line.rstrip() for line in printed.file.getvalue().splitlines()) + "\n"


def compare(rates: list[int], blocks: int, training: int, seconds: float) -> dict[int, list[Row]]:
    """Rows by rate. Raises KvfmtError as :func:`study`."""
    rng = np.random.default_rng(SEED)
    train = rng.standard_normal((training, BLOCK)).astype(np.float32)
    score = rng.standard_normal((blocks, BLOCK)).astype(np.float32)
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        return {b: study(b, train, score, seconds) for b in rates}
    finally:
        numba.set_num_threads(before)


def main(
    bits: str = typer.Option("2,3", help="rates"),
    blocks: int = typer.Option(4000, min=1, help="blocks of 64 that are scored"),
    training: int = typer.Option(128, min=16, help="blocks of 64 on which each code's scales are chosen"),
    seconds: float = typer.Option(2.0, min=0, help="of timing each encoder and decoder; the least of the turns counts"),
    output: Optional[Path] = typer.Option(None, help="a file for what is printed"),
) -> None:
    """Other E8 codes against the formats' own."""
    try:
        text = report(compare(numbers(bits), blocks, training, seconds))
        if output:
            write_whole(output, text)
        print(text, end="")
    except KvfmtError as error:
        console.print(f"[bold red]error:[/bold red] {error}")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
