"""The part of the key geometry that commutes with RoPE: one scale per pair of channels that it rotates together.

Keys times s and queries times 1/s leave every logit as it is, and both may be done before RoPE, so the factors can live in
the model's weights. What is won is in the stored keys. A Hadamard rotation spreads a block format's error evenly over
the head, in proportion to the key's energy, so the expected squared error of a logit is proportional to

    sum_p s_p^2 K_p * sum_p Q_p / s_p^2

with K_p and Q_p the second moments of keys and queries in pair p. The least is at s_p^4 = Q_p / K_p. Second moments of a
pair are the same before and after RoPE. The mean counts: a cache that does not centre spends its levels on it too.

A rotation within a pair commutes with RoPE as well (s would be a complex number). It changes no K_p and no Q_p, so it wins
nothing here, and it would mix two rows of a weight, which quantized weights do not take without being quantized again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: A pair with less than this share of the median pair's energy counts as if it had that much: what was hardly ever seen
#: in calibration must not be blown up when another text has it.
FLOOR = 1e-3


@dataclass(frozen=True)
class Scales:
    """``key`` float64 [KV heads, head]: what each channel of the keys is multiplied by, and the queries divided by.

    ``gain`` is how much smaller the expected squared error of a logit is in theory, in dB, over all heads of the layer.
    """

    key: np.ndarray
    gain: float


def best_scales(keys: np.ndarray, queries: np.ndarray, pair: np.ndarray, shared: bool = False, powers_of_two: bool = False) -> Scales:
    """Scales for a layer. ``keys``, ``queries`` float64 [KV heads, head]: mean squares; queries over a KV head's query heads.
    ``pair`` int [head]: each channel's pair, as kvfmt.geometry.pair_of numbers them.

    With ``shared`` all heads get the same scales (norm weights serve all heads). The keys' total energy stays what it was, so
    that f16 holds them as before; with ``powers_of_two`` to within that. Raises ValueError for moments that are negative
    or not finite.
    """
    keys, queries = (np.asarray(m, np.float64) for m in (keys, queries))
    if keys.ndim != 2 or keys.shape != queries.shape or keys.shape[1:] != pair.shape:
        raise ValueError(f"moments of keys {keys.shape} and queries {queries.shape} for a head of {len(pair)}")
    if not (np.all(np.isfinite(keys)) and np.all(np.isfinite(queries)) and np.all(keys >= 0) and np.all(queries >= 0)):
        raise ValueError("mean squares must be finite and not negative")
    n = int(pair.max()) + 1
    k, q = (_floored(np.stack([np.bincount(pair, row, n) for row in m])) for m in (keys, queries))
    if shared:
        log_s = np.tile(_shared(k, q), (len(k), 1))
        if powers_of_two:
            log_s = np.tile(_rounded(log_s[0], k, q), (len(k), 1))
        log_s -= _energy_shift(log_s, k, powers_of_two)
    else:
        log_s = np.log2(q / k) / 4
        if powers_of_two:
            log_s = np.stack([_rounded(row, k[h : h + 1], q[h : h + 1]) for h, row in enumerate(log_s)])
        log_s -= np.array([[_energy_shift(row[None], k[h : h + 1], powers_of_two)] for h, row in enumerate(log_s)])
    gain = 10 * np.log10(_error(np.zeros_like(log_s), k, q) / _error(log_s, k, q))
    return Scales(np.exp2(log_s)[:, pair], float(gain))


def _floored(energy: np.ndarray) -> np.ndarray:
    """Energies of pairs [heads, pairs] with a floor; a head that was silent altogether counts as even."""
    out = energy.copy()
    for row in out:
        positive = row[row > 0]
        row[:] = np.maximum(row, FLOOR * np.median(positive)) if positive.size else 1.0
    return out


def _error(log_s: np.ndarray, k: np.ndarray, q: np.ndarray) -> float:
    """Expected squared error of the logits, summed over heads, up to a constant."""
    square = np.exp2(2 * log_s)
    return float(np.sum(np.sum(square * k, axis=1) * np.sum(q / square, axis=1)))


def _shared(k: np.ndarray, q: np.ndarray) -> np.ndarray:
    """log2 of the scales [pairs] that are best for all heads together: where the gradient is zero, by iteration."""
    square = np.sqrt(q.sum(axis=0) / k.sum(axis=0))
    for _ in range(100):
        stored, asked = (square * k).sum(axis=1), (q / square).sum(axis=1)
        better = np.sqrt((stored @ q) / (asked @ k))
        if np.allclose(better, square, rtol=1e-9):
            break
        square = better
    return np.log2(square) / 2


def _rounded(log_s: np.ndarray, k: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Whole numbers [pairs] near ``log_s``: the best common shift before rounding, then single steps that help."""
    heads = len(k)

    def error(candidate: np.ndarray) -> float:
        return _error(np.tile(candidate, (heads, 1)), k, q)

    best = min((np.round(log_s + shift) for shift in np.arange(16) / 16), key=error)
    least = error(best)
    for _ in range(4):
        before = least
        for i in range(len(best)):
            for step in (-1, 1):
                best[i] += step
                found = error(best)
                if found < least:
                    least = found
                    break
                best[i] -= step
        if least == before:
            break
    return best


def _energy_shift(log_s: np.ndarray, k: np.ndarray, whole: bool) -> float:
    """What to take off ``log_s`` [heads, pairs] so that the keys' energy stays."""
    shift = 0.5 * np.log2(np.sum(np.exp2(2 * log_s) * k) / np.sum(k))
    return float(np.round(shift)) if whole else float(shift)
