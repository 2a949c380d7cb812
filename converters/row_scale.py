"""Rows of a tensor times a number each, in the tensor's own bytes: quantized rows are not quantized again.

A quantized block is codes times a scale (and plus a minimum) in f16: the row's factor goes into those and the codes
stay. A power of two changes only the exponent, so nothing is rounded unless a scale leaves the normal range of f16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type

from kvfmt.errors import KvfmtError

#: Where a block has its f16 scales and minima, in bytes from its start: ggml-common.h of the pinned llama.cpp.
SCALES: dict[int, tuple[int, ...]] = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ1_S: (0,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
PLAIN = {Type.F32: "<f4", Type.F16: "<f2", Type.BF16: "<u2"}


class CannotScale(KvfmtError):
    """A type without a scale that takes any factor, or a factor that leaves the range of f16."""


@dataclass
class Rounding:
    """What scaling did to the numbers it touched: how many, how many are not exactly the product, the largest relative error."""

    touched: int = 0
    rounded: int = 0
    worst: float = 0.0

    def add(self, other: "Rounding") -> None:
        self.touched += other.touched
        self.rounded += other.rounded
        self.worst = max(self.worst, other.worst)


def can_scale(type_id: int) -> bool:
    """Whether rows of this type take a factor."""
    return type_id in SCALES or type_id in PLAIN


def scale_rows(raw: np.ndarray, type_id: int, factors: np.ndarray, name: str = "the tensor") -> tuple[np.ndarray, Rounding]:
    """``raw`` uint8 [rows, bytes] of that type, ``factors`` float64 [rows] -> new bytes, and what was rounded.

    Rows whose factor is 1 keep their bytes. Raises CannotScale, with ``name``, for a type without such scales and for a
    product that f16 cannot hold.
    """
    if not can_scale(type_id):
        known = ", ".join(sorted(Type(t).name for t in (*PLAIN, *SCALES)))
        kind = Type(type_id).name if type_id in set(Type) else f"type {type_id}"
        raise CannotScale(f"{name} is stored as {kind}, whose blocks have no f16 scale to multiply", f"These can be scaled: {known}.")
    factors = np.asarray(factors, np.float64)
    if factors.shape != raw.shape[:1] or not np.all(np.isfinite(factors)):
        raise ValueError(f"factors {factors.shape} for rows {raw.shape[:1]} must be finite numbers")
    out = raw.copy()
    rows = np.flatnonzero(factors != 1)
    if not len(rows):
        return out, Rounding()
    if type_id in PLAIN:
        made, rounding = _scaled(raw[rows], PLAIN[Type(type_id)], type_id == Type.BF16, factors[rows, None], name)
        out[rows] = made
        return out, rounding
    size = GGML_QUANT_SIZES[Type(type_id)][1]
    blocks, source = out.reshape(len(raw), -1, size), raw.reshape(len(raw), -1, size)
    rounding = Rounding()
    for at in SCALES[Type(type_id)]:
        numbers = np.ascontiguousarray(source[rows, :, at : at + 2]).reshape(len(rows), -1)
        made, one = _scaled(numbers, "<f2", False, factors[rows, None], name)
        blocks[rows, :, at : at + 2] = made.reshape(len(rows), -1, 2)
        rounding.add(one)
    return out, rounding


def _scaled(raw: np.ndarray, form: str, is_bf16: bool, factors: np.ndarray, name: str) -> tuple[np.ndarray, Rounding]:
    """Numbers as bytes uint8 [rows, bytes] times factors [rows, 1]: bytes again."""
    before = _from_bf16(raw.view(form)) if is_bf16 else raw.view(form).astype(np.float64)
    exact = before * factors
    with np.errstate(over="ignore"):
        stored = _to_bf16(exact) if is_bf16 else exact.astype(form)
    after = _from_bf16(stored) if is_bf16 else stored.astype(np.float64)
    if not np.all(np.isfinite(after) | ~np.isfinite(before)):
        raise CannotScale(f"{name}: a scale of up to {np.nanmax(np.abs(exact)):.3g} does not fit its type", "The factors are too large.")
    wrong = np.isfinite(exact) & (after != exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(after - exact)[wrong] / np.abs(exact)[wrong]
    worst = float(errors.max()) if errors.size else 0.0
    return np.ascontiguousarray(stored).view(np.uint8).reshape(raw.shape), Rounding(before.size, int(wrong.sum()), worst)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """float64 -> bf16 bits, to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
