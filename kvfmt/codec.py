"""Whole arrays through block kernels: shapes, threads and checks, the same for every format."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from .build.lock import locked
from .build.paths import cache_dir
from .scalar import f16_bits_to_f32, f32_to_f16_bits
from .spec import BlockSpec

#: ggml's q8_0, the type in which flash attention hands queries to a quantized key:
#: 32 values, an f16 scale and 32 signed bytes.
Q8_0_BLOCK = 32
Q8_0_SIZE = 34


@njit(cache=True)
def _encode_q8_0(x, scales, codes):
    """One row of float32 as ggml's q8_0: scale = amax / 127, codes rounded half away from zero."""
    for b in range(scales.shape[0]):
        amax = np.float32(0.0)
        for i in range(Q8_0_BLOCK):
            amax = max(amax, abs(x[b * Q8_0_BLOCK + i]))
        d = amax / np.float32(127.0)
        inverse = np.float32(1.0) / d if d != 0 else np.float32(0.0)
        scales[b] = f16_bits_to_f32(f32_to_f16_bits(d))
        for i in range(Q8_0_BLOCK):
            v = x[b * Q8_0_BLOCK + i] * inverse
            codes[b * Q8_0_BLOCK + i] = np.int32(np.trunc(v + np.copysign(np.float32(0.5), v)))


def make_drivers(
    encode_block: Callable, decode_levels: Callable, block: int, size: int, level_shift: int, scratch: int = 0
):
    """Threaded loops over blocks around two jitted block kernels.

    ``encode_block(x f32[block], out u8[size], xi i32[block], codes u8[block], words i32[scratch])`` writes one block;
    ``decode_levels(data u8[size], levels i32[block]) -> f32`` unpacks its integer levels and returns the scale.
    """
    unit = np.float32(2.0**-level_shift)

    @njit(parallel=True, cache=True)
    def encode(x, out):
        # One chunk a thread keeps the scratch arrays out of the inner loop.
        n = x.shape[0]
        chunk = 256
        for c in prange((n + chunk - 1) // chunk):
            xi = np.empty(block, np.int32)
            words = np.empty(scratch, np.int32)
            codes = np.empty(block, np.uint8)
            for b in range(c * chunk, min(n, (c + 1) * chunk)):
                encode_block(x[b], out[b], xi, codes, words)

    @njit(parallel=True, cache=True)
    def decode(data, out):
        n = data.shape[0]
        chunk = 256
        for c in prange((n + chunk - 1) // chunk):
            levels = np.empty(block, np.int32)
            for b in range(c * chunk, min(n, (c + 1) * chunk)):
                scale = decode_levels(data[b], levels)
                for i in range(block):
                    out[b, i] = scale * (np.float32(levels[i]) * unit)

    @njit(parallel=True, cache=True)
    def dot(data, scales, codes, out):
        # data u8[rows, blocks, size]; the query as q8_0: scales f32[2 * blocks], codes i32[block * blocks]
        per_block = block // Q8_0_BLOCK
        for r in prange(data.shape[0]):
            levels = np.empty(block, np.int32)
            total = np.float32(0.0)
            for b in range(data.shape[1]):
                scale = decode_levels(data[r, b], levels)
                for h in range(per_block):
                    acc = np.int32(0)
                    for i in range(Q8_0_BLOCK):
                        acc += levels[h * Q8_0_BLOCK + i] * codes[b * block + h * Q8_0_BLOCK + i]
                    total += (scale * scales[b * per_block + h]) * (np.float32(acc) * unit)
            out[r] = total

    return encode, decode, dot


def compiling_alone(kernel: Callable) -> contextlib.AbstractContextManager:
    """Holds off other processes while ``kernel`` is compiled, or loaded from Numba's cache, for the first time.

    The kernels of all formats are one source line, so Numba keeps them in one index. Two processes that compile
    different formats at once number their files alike, and from then on one format is read with the other's code.
    """
    stack = contextlib.ExitStack()
    # Without Numba a kernel is a plain function, and nothing is compiled.
    if not getattr(kernel, "signatures", True):
        # A cache that cannot be written to cannot be spoiled either.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(cache_dir() / "numba", wait=True))
    return stack


@dataclass(frozen=True)
class Format:
    """A registered format: its spec and the array functions on it."""

    spec: BlockSpec
    _encode: Callable
    _decode: Callable
    _dot: Callable

    # numba's workqueue layer aborts when two Python threads enter parallel code at once.
    _lock = threading.RLock()

    def encode(self, x: np.ndarray) -> np.ndarray:
        """float32 values [..., n] -> packed blocks, uint8 [..., n / block * size].

        NaN encodes as 0 and values beyond +-65504 saturate; every block decodes to finite values.
        Raises TypeError for a dtype that is not a float, ValueError if the block does not divide n.
        """
        x = np.asarray(x)
        if x.dtype.kind != "f":
            raise TypeError(f"{self.spec.name}: encode takes floating-point values, not {x.dtype}")
        if x.ndim == 0:
            raise ValueError(f"{self.spec.name}: encode takes rows of values, not a scalar")
        row = self.spec.row_bytes(x.shape[-1])
        with np.errstate(over="ignore"):
            blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, self.spec.block)
        out = np.empty((blocks.shape[0], self.spec.size), np.uint8)
        with self._lock, compiling_alone(self._encode):
            self._encode(blocks, out)
        return out.reshape(*x.shape[:-1], row)

    def decode(self, data: np.ndarray) -> np.ndarray:
        """Packed blocks, uint8 [..., k * size] -> float32 values [..., k * block].

        Raises TypeError for another dtype, ValueError if the rows are not whole blocks.
        """
        data = self._whole_blocks(data)
        blocks = np.ascontiguousarray(data).reshape(-1, self.spec.size)
        out = np.empty((blocks.shape[0], self.spec.block), np.float32)
        with self._lock, compiling_alone(self._decode):
            self._decode(blocks, out)
        return out.reshape(*data.shape[:-1], data.shape[-1] // self.spec.size * self.spec.block)

    def dot(self, data: np.ndarray, query: np.ndarray) -> np.ndarray:
        """Packed rows, uint8 [rows, k * size], times a float32 query [k * block] -> float32 [rows].

        As in ggml, the query is first quantized to q8_0; the products are summed as integers. The
        result is within ``(2**-7 * max|q| + 2**-18) * sum|k|`` of the float64 product of the decoded
        row, for max|q| below 127 * 65504, where q8_0's own f16 scale overflows.
        Raises TypeError or ValueError for shapes and dtypes that do not fit.
        """
        data = self._whole_blocks(data)
        query = np.ascontiguousarray(query, dtype=np.float32)
        n_blocks = data.shape[-1] // self.spec.size
        if data.ndim != 2 or query.shape != (n_blocks * self.spec.block,):
            raise ValueError(
                f"{self.spec.name}: rows {data.shape} of {n_blocks} blocks and a query {query.shape} do not "
                f"fit; the query needs {n_blocks * self.spec.block} values"
            )
        scales = np.empty(query.size // Q8_0_BLOCK, np.float32)
        codes = np.empty(query.size, np.int32)
        out = np.empty(data.shape[0], np.float32)
        with self._lock, compiling_alone(self._dot):
            _encode_q8_0(query, scales, codes)
            self._dot(np.ascontiguousarray(data).reshape(data.shape[0], n_blocks, self.spec.size), scales, codes, out)
        return out

    def _whole_blocks(self, data: np.ndarray) -> np.ndarray:
        data = np.asarray(data)
        if data.dtype != np.uint8:
            raise TypeError(f"{self.spec.name}: packed blocks are uint8, not {data.dtype}")
        if data.ndim == 0 or data.shape[-1] % self.spec.size:
            raise ValueError(
                f"{self.spec.name}: {data.shape[-1] if data.ndim else 1} bytes are not whole blocks of {self.spec.size}"
            )
        return data
