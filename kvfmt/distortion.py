"""How far a format is from what is possible: squared error on a unit Gaussian against the rate-distortion bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .codec import Format

#: Values drawn by default; the standard error of the mean is then below 0.2 % of it.
N_VALUES = 64 * 20_000
SEED = 20240817


@dataclass(frozen=True)
class Distortion:
    """Mean squared error, twice. ``codes``: each block at its best scale, what the codes are worth. ``stored``: as decoded.

    They are the same to the rounding of the scale where a format stores the least-squares scale; an unbiased scale is
    larger on purpose (see :mod:`kvfmt.formats._lloyd`), and a scale from the largest value is a little off.
    """

    codes: float
    stored: float


def block_errors(fmt: Format, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squared error of every block of encode + decode: at its best scale, and as stored; float64 [..., n / block] each.

    ``x``: float32 [..., n]. Raises ValueError if the block does not divide n.
    """
    shape = (*x.shape[:-1], -1, fmt.spec.block)
    decoded = fmt.decode(fmt.encode(x)).astype(np.float64).reshape(shape)
    values = x.astype(np.float64).reshape(shape)
    stored = np.square(decoded - values).sum(axis=-1)
    product = np.maximum((decoded * values).sum(axis=-1), 0)
    energy = np.square(decoded).sum(axis=-1)
    explained = np.divide(product * product, energy, out=np.zeros_like(product), where=energy > 0)
    return np.square(values).sum(axis=-1) - explained, stored


def gaussian_distortion(fmt: Format, n_values: int = N_VALUES, seed: int = SEED) -> Distortion:
    """Mean squared error of encode + decode on independent unit Gaussians."""
    x = np.random.default_rng(seed).standard_normal(n_values - n_values % fmt.spec.block).astype(np.float32)
    codes, stored = block_errors(fmt, x)
    return Distortion(float(codes.sum() / x.size), float(stored.sum() / x.size))


def group_distortion(fmt: Format, n_values: int = N_VALUES, seed: int = SEED) -> list[float]:
    """The same for each group of a format with unequal bits, every group a unit Gaussian as a profile makes it."""
    x = np.random.default_rng(seed).standard_normal((n_values // fmt.spec.block, fmt.spec.block)).astype(np.float32)
    error = fmt.decode(fmt.encode(x)).astype(np.float64) - x
    parts = np.split(np.mean(error * error, axis=0), np.cumsum(fmt.spec.groups)[:-1])
    return [float(part.mean()) for part in parts]


def rate_distortion_bound(bits_per_value: float) -> float:
    """Least mean squared error of any code for a unit Gaussian: 2**(-2 bits) (Shannon 1959)."""
    return 2.0 ** (-2 * bits_per_value)


def decibel_above_bound(distortion: float, bits_per_value: float) -> float:
    """Gap to the bound at the allocated rate, in dB; 6.02 dB is one bit."""
    return float(10 * np.log10(distortion / rate_distortion_bound(bits_per_value)))
