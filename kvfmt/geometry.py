"""From statistics to maps: which coordinates keys are stored in, so that the error lands where queries do not look.

Stored is k' = A (k - m), asked is with q' = A^-T q: q'.k' = q.k - q.m, and softmax ignores q.m, which is the same for every key.
If storing adds noise of equal size in every direction of k', the expected squared error of a logit is proportional to

    tr(A Sk A^T) tr(A^-T Sq A^-1) / d

with Sk the covariance of keys and Sq the second moment of queries. Its least value over all A has A^T A = Sk^-1 # Sq (the
matrix geometric mean); in those coordinates both have the same covariance, here diagonal with falling entries: the *spectrum*.
What follows, a layout, orders, scales and mixes these channels for one format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable

import numpy as np
from scipy.fft import dct
from scipy.linalg import cholesky, svd

from kvfmt.errors import KvfmtError, UnknownName
from kvfmt.moments import LayerStatistics
from kvfmt.policy import FLAT_LAYOUT
from kvfmt.transform import hadamard

MAPS = ("none", "pairs", "channels", "full")
#: Those under which a channel is of one size in keys and in queries, which a layout that orders channels counts on.
ORDERED = ("channels", "full")
#: Least variance of a channel, relative to the mean of its head: one that never varied must not be scaled without bound.
FLOOR = 1e-7
#: How many times its size a head needs in tokens before half of what lies off the diagonal is believed.
SHRINK = 4


@lru_cache(maxsize=None)
def mixing(size: int) -> np.ndarray:
    """An orthogonal matrix, float64 [size, size], that spreads each value over all: Hadamard's if the size is a power of two.

    Else the Kronecker product of the largest Hadamard that divides it and a cosine transform of the odd rest.
    """
    if size < 1:
        raise ValueError(f"no mixing of {size} values")
    power = size & -size
    even = hadamard(np.eye(power), power)
    odd = size // power
    matrix = even if odd == 1 else np.kron(even, dct(np.eye(odd), norm="ortho", axis=0))
    matrix.flags.writeable = False
    return matrix


@dataclass(frozen=True)
class Layout:
    """How a head's channels are laid into the slots of a format's blocks, then mixed within groups of slots.

    ``order(spectrum)``: the channel of each slot, int [d]. ``gains(spectrum in slot order)``: a factor for each slot, float [d].
    ``groups(d)``: sizes of consecutive groups of slots, which sum to d. ``spectrum`` float64 [d]: a channel's size in keys times
    its size in queries, as standard deviations; with the full map it falls, and equals the variance of both.
    """

    name: str
    order: Callable[[np.ndarray], np.ndarray]
    gains: Callable[[np.ndarray], np.ndarray]
    groups: Callable[[int], tuple[int, ...]]

    def matrices(self, spectrum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(F, F^-T), float64 [d, d]: channels to what is stored, and the same for queries."""
        size = len(spectrum)
        order, gains, _ = self.parts(spectrum)
        mixed = np.zeros((size, size))
        start = 0
        for group in self.groups(size):
            mixed[start : start + group, start : start + group] = mixing(group)
            start += group
        forward, inverse = np.zeros((size, size)), np.zeros((size, size))
        forward[:, order] = mixed * gains
        inverse[:, order] = mixed / gains
        return forward, inverse

    def parts(self, spectrum: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """What the matrices are made of: the channel of each slot, int [d], its factor, float64 [d], and the matrix that mixes every
        group, float64 [g, g], None where they are not all of one size."""
        size = len(spectrum)
        order = np.asarray(self.order(spectrum))
        gains = np.asarray(self.gains(spectrum[order]), np.float64)
        groups = self.groups(size)
        if sorted(order) != list(range(size)) or sum(groups) != size or not (gains > 0).all() or not np.isfinite(gains).all():
            raise ValueError(f"layout {self.name} does not lay out {size} channels")
        return order, gains, mixing(groups[0]) if len(set(groups)) == 1 else None


#: For any type whose noise is the same in every slot: everything is spread over the whole head.
FLAT = Layout(FLAT_LAYOUT, lambda s: np.arange(len(s)), lambda s: np.ones(len(s)), lambda d: (d,))


def by_importance(name: str, sizes: tuple[int, ...]) -> Layout:
    """The layout of a format whose blocks are groups of falling precision, of the given sizes.

    Channel of rank r, by falling spectrum, goes to block r mod the number of blocks, the next free slot, so that all
    blocks are alike. Each group is scaled to unit mean variance, as a spectrum of the full map says it, and mixed. Its
    functions raise KvfmtError for heads that are not whole blocks.
    """
    block = sum(sizes)

    def blocks(size: int) -> int:
        if size % block:
            raise KvfmtError(f"heads of {size} values are not whole blocks of {name}, {block} each", "Choose another type for this model's keys.")
        return size // block

    def order(spectrum: np.ndarray) -> np.ndarray:
        count = blocks(len(spectrum))
        return np.argsort(-spectrum, kind="stable").reshape(block, count).T.ravel()

    def groups(size: int) -> tuple[int, ...]:
        return sizes * blocks(size)

    def gains(spectrum: np.ndarray) -> np.ndarray:
        parts = np.split(spectrum, np.cumsum(groups(len(spectrum)))[:-1])
        return np.concatenate([np.full(len(part), np.mean(part) ** -0.5) for part in parts])

    return Layout(name, order, gains, groups)


@lru_cache(maxsize=None)
def layout_for(kind: str) -> Layout:
    """The layout that a cache type wants: its own if it needs one, else "flat". Raises UnknownName for no cache type."""
    from kvfmt import registry
    from kvfmt.policy import cache_type

    if kind == FLAT.name:
        return FLAT
    chosen = cache_type(kind)
    return by_importance(chosen.name, registry.get(chosen.name).spec.groups) if chosen.needs_profile else FLAT


@dataclass(frozen=True)
class KeyMaps:
    """Maps of one layer, float64: ``mean`` [H, d] or None, ``key`` A and ``query`` A^-T [H, d, d]; ``scale`` [H, d], the diagonal that A
    is before the layout, where it is one.

    ``error`` [H]: tr(A Sk A^T) tr(A^-T Sq A^-1) / d before the layout, with the statistics as they were made (Sk not
    centred where the map does not centre): what uniform noise of unit relative size would do to a logit, squared.
    ``plain`` [H]: the same for a Hadamard alone. ``first_error`` and ``first_plain`` [H]: the same of the key at position 0,
    which may lie far from all others.

    ``order`` int [H, d] and ``mix`` [g, g], with a diagonal map and a layout of equal groups: slot j of a head holds channel order[j],
    scaled, and every g slots are mixed alike.
    """

    mean: np.ndarray | None
    key: np.ndarray
    query: np.ndarray
    error: np.ndarray
    plain: np.ndarray
    first_error: np.ndarray
    first_plain: np.ndarray
    scale: np.ndarray | None = None
    order: np.ndarray | None = None
    mix: np.ndarray | None = None


def logit_error(a: np.ndarray, inverse: np.ndarray, keys: np.ndarray, queries: np.ndarray, noise: np.ndarray | float = 1.0) -> float:
    """tr(A Sk A^T) tr(N A^-T Sq A^-1) / d for A and A^-T, float64 [d, d] each, and second moments [d, d]. ``noise``: the diagonal of N,
    float64 [d], each slot's error relative to the mean power of the block, which the slots' common scale follows."""
    asked = np.sum((inverse @ queries) * inverse, axis=1)
    return float(np.sum((a @ keys) * a) * np.sum(noise * asked) / len(a))


def shrunk(moment: np.ndarray, count: int) -> np.ndarray:
    """A second moment, float64 [d, d], made safe to invert.

    Rule: the share 4 d / (n + 4 d) of what lies off the diagonal is dropped, n the number of vectors that it was made from,
    and FLOOR times the mean of the diagonal is added to it. With no variance at all it becomes the unit matrix.
    (4: on another text, 1,000 tokens of SmolLM2 give 0.1 to 0.2 dB more than with 1, and 8,000 and more lose nothing.)
    """
    size = len(moment)
    power = np.trace(moment) / size
    if not power > 0:
        return np.eye(size)
    diagonal = np.maximum(np.diag(moment), 0)
    share = SHRINK * size / (count + SHRINK * size)
    safe = moment * (1 - share)
    # The floor is added, not clipped to: a matrix whose variances vanish in a direction between channels needs it too.
    safe[np.diag_indices(size)] = diagonal + FLOOR * power
    return (safe + safe.T) / 2


def pair_map(keys: np.ndarray, queries: np.ndarray, rotated: int, adjacent: bool) -> tuple[np.ndarray, np.ndarray]:
    """(A, A^-T), diagonal: both members of a RoPE pair are scaled alike, so that it commutes with the rotation; with no value
    ``rotated`` each counts for itself.

    The factor is the fourth root of the queries' power over the keys' in the pair.
    """
    pairs = pair_of(len(keys), rotated, adjacent)
    k_power, q_power = (np.bincount(pairs, weights=np.diag(m)) / np.bincount(pairs) for m in (keys, queries))
    factor = ((q_power / k_power) ** 0.25)[pairs]
    return np.diag(factor), np.diag(1 / factor)


def pair_of(size: int, rotated: int, adjacent: bool) -> np.ndarray:
    """Number of the RoPE pair that each of ``size`` values belongs to, int [size]; the rest are numbered on, one each."""
    half = rotated // 2
    inner = np.repeat(np.arange(half), 2) if adjacent else np.tile(np.arange(half), 2)
    return np.concatenate([inner, np.arange(half, half + size - rotated)])


def full_map(keys: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A, A^-T, spectrum) with A^T A = keys^-1 # queries and A keys A^T = A^-T queries A^-1 = diag(spectrum), falling.

    With keys = L L^T, queries = R R^T and L^T R = W S V^T: A = S^-1/2 V^T R^T and A^-T = S^-1/2 W^T L^T, so nothing is
    inverted (as in balanced truncation, Moore 1981). Raises KvfmtError if one of them is not positive definite.
    """
    try:
        left, right = cholesky(keys, lower=True), cholesky(queries, lower=True)
        w, spectrum, vt = svd(left.T @ right)
    except (np.linalg.LinAlgError, ValueError) as error:
        raise KvfmtError(f"no map for these statistics: {error}", "They are damaged, or made from too few tokens.") from None
    root = spectrum[:, None] ** -0.5
    return root * (vt @ right.T), root * (w.T @ left.T), spectrum


def head_map(keys: np.ndarray, queries: np.ndarray, kind: str, rotated: int, adjacent: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A, A^-T, spectrum) of one head before the layout, for safe second moments, float64 [d, d]. ``kind`` is one of MAPS."""
    if kind == "full":
        return full_map(keys, queries)
    if kind in ("pairs", "channels"):
        # Keys are stored, and queries ask, after RoPE: nothing has to commute with it.
        a, inverse = pair_map(keys, queries, rotated if kind == "pairs" else 0, adjacent)
    else:
        a = inverse = np.eye(len(keys))
    spectrum = np.sqrt(np.diag(a @ keys @ a.T) * np.diag(inverse @ queries @ inverse.T))
    return a, inverse, spectrum


def check_kind(kind: str, layout: Layout) -> None:
    """Raises UnknownName unless ``kind`` is one of MAPS, KvfmtError if its channels do not suit the layout."""
    if kind not in MAPS:
        raise UnknownName(f"unknown map '{kind}'", "Known: " + ", ".join(MAPS))
    if kind not in ORDERED and layout is not FLAT:
        raise KvfmtError(f"the channels of map '{kind}' are not of the size that layout {layout.name} counts on", "Use one of: " + ", ".join(ORDERED))


def key_maps(statistics: LayerStatistics, layout: Layout = FLAT, kind: str = "full", centre: bool = True) -> KeyMaps:
    """The maps of a layer's keys. ``centre`` is ignored where the layer's softmax is not shift-invariant.

    Scaled so that stored keys have mean power 1. Raises UnknownName for an unknown ``kind``, KvfmtError for damaged statistics,
    and for a map other than ORDERED with a layout other than FLAT.
    """
    check_kind(kind, layout)
    centre = centre and statistics.shift_free
    seen = (statistics.k_cov if centre else statistics.k_moment()).astype(np.float64)
    plain_seen = statistics.k_moment().astype(np.float64)
    key, query, errors, scales, orders, mix = [], [], [], [], [], None
    for head in range(statistics.heads):
        asked = statistics.q_moment[head].astype(np.float64)
        a, inverse, spectrum = head_map(
            shrunk(seen[head], statistics.tokens), shrunk(asked, statistics.queries), kind, statistics.rotated, statistics.adjacent
        )
        first = statistics.k_first[head].astype(np.float64)
        away, unit = first - statistics.k_mean[head] if centre else first, np.eye(len(a))
        errors.append((
            logit_error(a, inverse, seen[head], asked),
            logit_error(unit, unit, plain_seen[head], asked),
            logit_error(a, inverse, np.outer(away, away), asked),
            logit_error(unit, unit, np.outer(first, first), asked),
        ))
        forward, backward = layout.matrices(spectrum)
        diagonal = np.diag(a).copy()
        a, inverse = forward @ a, backward @ inverse
        power = np.sum((a @ seen[head]) * a) / len(a)
        scale = power**-0.5 if power > 0 else 1.0
        if kind != "full":
            order, gains, mix = layout.parts(spectrum)
            diagonal[order] *= gains
            scales.append(diagonal * scale)
            orders.append(order)
        key.append(a * scale)
        query.append(inverse / scale)
    mean = statistics.k_mean.astype(np.float64) if centre else None
    made = KeyMaps(mean, np.stack(key), np.stack(query), *np.array(errors).T)
    if kind == "full":
        return made
    if layout is FLAT:
        return replace(made, scale=np.stack(scales))
    # Groups of several sizes are not mixed alike: then there are only the matrices.
    return made if mix is None else replace(made, scale=np.stack(scales), order=np.stack(orders), mix=mix)


def value_mean(statistics: LayerStatistics) -> np.ndarray | None:
    """What may be taken off a layer's values before they are stored, float32 [H, d_v]; None where its softmax is not shift-invariant."""
    return statistics.v_centre.astype(np.float32) if statistics.shift_free else None
