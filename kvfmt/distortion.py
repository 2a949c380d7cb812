"""How far a format is from what is possible: squared error on a unit Gaussian against the rate-distortion bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import registry
from .codec import Format

#: Values drawn by default; the standard error of the mean is then below 0.2 % of it.
N_VALUES = 64 * 20_000
SEED = 20240817
#: Blocks that a prediction is made from: to 1 %, in milliseconds.
PREDICTED_BLOCKS = 2000


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


@lru_cache(maxsize=None)
def slot_noise(fmt: Format, size: int) -> np.ndarray:
    """Relative squared error in each slot of a head of ``size`` values, float64 [size], where every slot holds a unit Gaussian; read-only.

    Raises ValueError if the block does not divide the head.
    """
    if size % fmt.spec.block:
        raise ValueError(f"heads of {size} values are not whole blocks of {fmt.spec.name}, {fmt.spec.block} each")
    n_values = fmt.spec.block * PREDICTED_BLOCKS
    if fmt.spec.groups:
        block = np.repeat(group_distortion(fmt, n_values), fmt.spec.groups)
    else:
        block = np.full(fmt.spec.block, gaussian_distortion(fmt, n_values).stored)
    found = np.tile(block, size // fmt.spec.block)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=None)
def equal_noise(fmt: Format) -> float:
    """Least relative squared error on a unit Gaussian of our types that are as large and treat all values alike. Raises ValueError if there
    is none."""
    rivals = [
        other for other in registry.all_formats()
        if not other.spec.needs_profile and other.spec.bits_per_value == fmt.spec.bits_per_value
    ]
    return min(float(slot_noise(other, other.spec.block)[0]) for other in rivals)


def rate_distortion_bound(bits_per_value: float) -> float:
    """Least mean squared error of any code for a unit Gaussian: 2**(-2 bits) (Shannon 1959)."""
    return 2.0 ** (-2 * bits_per_value)


def decibel_above_bound(distortion: float, bits_per_value: float) -> float:
    """Gap to the bound at the allocated rate, in dB; 6.02 dB is one bit."""
    return float(10 * np.log10(distortion / rate_distortion_bound(bits_per_value)))
