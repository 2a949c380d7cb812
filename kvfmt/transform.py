"""What is done to K and V before they are stored: llama.cpp's Hadamard rotation of quantized caches."""

from __future__ import annotations

import numpy as np


def hadamard(x: np.ndarray, size: int) -> np.ndarray:
    """The orthonormal Walsh-Hadamard transform (Sylvester's order) of each run of ``size`` values.

    float [..., n] -> the same dtype and shape, a copy; it is its own inverse. Of float32 the very floats that
    ``ggml_compute_forward_fwht`` gives: scaled first, then sums and differences from neighbours outwards.
    Raises ValueError if ``size`` is not a power of two or does not divide n.
    """
    if size < 1 or size & (size - 1) or x.shape[-1] % size:
        raise ValueError(f"Hadamard size {size} must be a power of two that divides the row of {x.shape[-1]} values")
    # Each value of a run in a row of its own: then every step goes over long rows.
    y = x.reshape(-1, size).T.copy()
    y *= x.dtype.type(1) / np.sqrt(x.dtype.type(size))
    # A damaged cache may hold anything; infinities make NaN here as they do there.
    with np.errstate(over="ignore", invalid="ignore"):
        half = 1
        while half < size:
            pairs = y.reshape(size // (2 * half), 2, half, -1)
            lower = pairs[:, 1].copy()
            np.subtract(pairs[:, 0], lower, out=pairs[:, 1])
            pairs[:, 0] += lower
            half *= 2
    return np.ascontiguousarray(y.T).reshape(x.shape)


def rotation_size(head: int, keys: bool) -> int:
    """Values that llama.cpp's rotation mixes in a head of a quantized cache; 1 where it does not rotate.

    Keys: the largest 64 * 2**n that divides the head. Values: 64. From build_input_k_rot and build_input_v_rot
    of the pinned llama-kv-cache.cpp.
    """
    if head % 64:
        return 1
    size = 64
    while keys and head % (2 * size) == 0:
        size *= 2
    return size
