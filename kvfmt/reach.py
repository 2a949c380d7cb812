"""Statistics for contexts longer than those that were run: keys and queries, turned on together.

RoPE turns a key and a query at position p by p times the frequency of each pair of values (Su et al. 2021, arXiv 2104.09864,
section 3.4), and their product depends on the difference of positions alone. So a run of 1,024 tokens that starts at
position 7,000 has the logits of one that starts at 0, and its keys and queries are those of the first, turned by 7,000
steps. Their moments over all such starts are known without running the model: the entry for two channels of
frequencies a and b is multiplied by the mean of exp(i (a - b) start).

Without this a profile serves only the context lengths that it was made at: the mean key of a slow pair at 1,024 tokens is
elsewhere at 4,096, where subtracting it does harm. The key at position 0 is the exception: it stays where it is.
"""

from __future__ import annotations

import numpy as np


def spans_to(length: int, reach: int) -> tuple[int, ...]:
    """Starts that contexts of ``length`` tokens may have: 0, and up to 1, 3, 7 ... lengths, as far as ``reach`` goes.

    Each of these spans counts alike, so that short contexts, where every long one begins, keep half of the weight.
    """
    spans, end = [0], 2 * length
    while end < reach:
        spans.append(end - length)
        end *= 2
    if reach > length:
        spans.append(reach - length)
    return tuple(spans)


def turned_moments(
    mean: np.ndarray, second: np.ndarray, frequencies: np.ndarray, adjacent: bool, spans: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean float64 [H, d] and second moment float64 [H, d, d] of vectors that RoPE turns on by a start, uniform in each of ``spans``.

    ``frequencies`` float64 [rotated / 2], radians a token; ``adjacent``: a pair is 2i and 2i + 1, else i and i + rotated / 2.
    Values beyond ``rotated`` stay.
    """
    size, half = mean.shape[-1], len(frequencies)
    first, other = (np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)) if adjacent else (np.arange(half), half + np.arange(half))
    rest = np.arange(2 * half, size)
    # Complex coordinates z and their conjugates, in which turning is a factor; the basis is unitary.
    basis = np.zeros((size, size), complex)
    at = np.arange(half)
    basis[at, first], basis[at, other] = np.sqrt(0.5), 1j * np.sqrt(0.5)
    basis[half + at, first], basis[half + at, other] = np.sqrt(0.5), -1j * np.sqrt(0.5)
    basis[2 * half + np.arange(len(rest)), rest] = 1
    speed = np.concatenate([frequencies, -frequencies, np.zeros(len(rest))])
    back = basis.conj().T
    turned = basis @ second @ back * _mean_turn(speed[:, None] - speed[None, :], spans)
    found = (back @ turned @ basis).real
    return (mean @ basis.T * _mean_turn(speed, spans) @ back.T).real, (found + found.swapaxes(-1, -2)) / 2


def _mean_turn(speed: np.ndarray, spans: tuple[int, ...]) -> np.ndarray:
    """Mean of exp(i speed start) over starts 0, 1 ... span, and over spans."""
    total = np.zeros(speed.shape, complex)
    for span in spans:
        half_turn = speed / 2
        n = span + 1
        with np.errstate(invalid="ignore", divide="ignore"):
            sums = np.sin(n * half_turn) / (n * np.sin(half_turn))
        total += np.where(np.abs(np.sin(half_turn)) < 1e-12, 1.0, sums) * np.exp(1j * half_turn * span)
    return total / len(spans)
