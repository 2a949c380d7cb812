"""What a stored K or V may be put through. A codec knows values and bits; which cells it gets is a policy's matter.

Every codec takes float32 [tokens, heads, head size] and gives back what a reader would see, the same shape. Its
rate is what it would allocate: codes, scales, offsets, orders. Scales are f16, as in a block format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.transform import hadamard, rotation_size

F16_MAX = np.float32(65504.0)


class Codec(Protocol):
    """``name`` is what a table calls it."""

    name: str

    def apply(self, x: np.ndarray) -> np.ndarray:
        """float32 [tokens, heads, dim] -> the same shape, as read back."""

    def allocated_bits(self, tokens: int, heads: int, dim: int) -> int:
        """Whole bits that storing such an array takes."""


def bits_per_value(codec: Codec, tokens: int, heads: int, dim: int) -> float:
    """Allocated bits per value; tables that are stored once make it fall as ``tokens`` grows."""
    return codec.allocated_bits(tokens, heads, dim) / (tokens * heads * dim)


def as_f16(x: np.ndarray) -> np.ndarray:
    """Rounded to f16 and back, saturating: what a stored scale becomes."""
    return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)


def grouped(x: np.ndarray, group: int, name: str) -> np.ndarray:
    """[tokens, heads, dim] -> [tokens, heads, dim / group, group]. Raises KvfmtError if the group does not divide dim."""
    if x.shape[-1] % group:
        raise KvfmtError(
            f"{name}: groups of {group} do not divide heads of {x.shape[-1]} values", "Choose a codec whose group divides the head."
        )
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


@dataclass(frozen=True)
class Exact:
    """f16, as the cache holds it: nothing changes."""

    name: str = "f16"

    def apply(self, x):
        return x

    def allocated_bits(self, tokens, heads, dim):
        return 16 * tokens * heads * dim


@dataclass(frozen=True)
class LastBits:
    """f16 with the last bit of one value in ``every`` flipped: what a change that means nothing does to the model.

    llama.cpp rounds activations to 8 bits before it multiplies them with quantized weights, and so makes a
    small difference a larger one. No method can be closer to f16 than about this.
    """

    every: int = 1000

    @property
    def name(self) -> str:
        return f"f16, last bit of 1 in {self.every} flipped"

    def apply(self, x):
        bits = x.astype(np.float16).view(np.uint16)
        flipped = np.random.default_rng(x.size).random(x.shape) < 1 / self.every
        return (bits ^ flipped.astype(np.uint16)).view(np.float16).astype(np.float32)

    def allocated_bits(self, tokens, heads, dim):
        return 16 * tokens * heads * dim


@dataclass(frozen=True)
class Blocks:
    """A registered format of kvfmt."""

    name: str

    @property
    def _format(self):
        return registry.get(self.name)

    def apply(self, x):
        fmt = self._format
        grouped(x, fmt.spec.block, self.name)
        return fmt.decode(fmt.encode(np.ascontiguousarray(x)))

    def allocated_bits(self, tokens, heads, dim):
        return 8 * tokens * heads * self._format.spec.row_bytes(dim)


@dataclass(frozen=True)
class Stock:
    """A type of upstream's, by gguf-py's own quantizer."""

    name: str

    @property
    def _type(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.name.upper()]

    def apply(self, x):
        grouped(x, GGML_QUANT_SIZES[self._type][0], self.name)
        return dequantize(quantize(np.ascontiguousarray(x), self._type), self._type).reshape(x.shape)

    def allocated_bits(self, tokens, heads, dim):
        block, size = GGML_QUANT_SIZES[self._type]
        return 8 * tokens * heads * (dim // block) * size


@dataclass(frozen=True)
class Int:
    """Whole numbers of ``bits`` bits, symmetric about 0, one scale for ``group`` values, for a head if it is 0.

    ``clip`` below 1 sets the scale by that share of the largest value and cuts off what lies beyond.
    """

    bits: int
    group: int = 0
    clip: float = 1.0

    @property
    def name(self) -> str:
        return f"int{self.bits}" + (f"/g{self.group}" if self.group else "") + (f" clipped at {self.clip}" if self.clip < 1 else "")

    def apply(self, x):
        g = grouped(x, self.group or x.shape[-1], self.name)
        top = np.float32(2 ** (self.bits - 1) - 1)
        scale = as_f16(np.abs(g).max(axis=-1, keepdims=True) * np.float32(self.clip) / top)
        codes = np.clip(np.rint(np.divide(g, scale, out=np.zeros_like(g), where=scale > 0)), -top, top)
        return (codes * scale).reshape(x.shape)

    def allocated_bits(self, tokens, heads, dim):
        return tokens * heads * (self.bits * dim + 16 * (dim // (self.group or dim)))


def _min_max(g: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Even steps between the least and the largest value along ``axis``; both the least and the step are f16."""
    least = as_f16(g.min(axis=axis, keepdims=True))
    step = as_f16((g.max(axis=axis, keepdims=True) - least) / np.float32(2**bits - 1))
    codes = np.clip(np.rint(np.divide(g - least, step, out=np.zeros_like(g), where=step > 0)), 0, 2**bits - 1)
    return least + codes * step


@dataclass(frozen=True)
class PerChannel:
    """Each channel's values of ``group`` tokens share a least value and a step: KIVI's keys (arXiv 2402.02750)."""

    bits: int = 2
    group: int = 32

    @property
    def name(self) -> str:
        return f"int{self.bits} per channel/g{self.group}"

    def apply(self, x):
        out = np.empty_like(x)
        whole = x.shape[0] - x.shape[0] % self.group
        if whole:
            g = x[:whole].reshape(-1, self.group, *x.shape[1:])
            out[:whole] = _min_max(g, self.bits, axis=1).reshape(whole, *x.shape[1:])
        # What does not fill a group has its own, shorter one, at the same cost in scales.
        if whole < x.shape[0]:
            out[whole:] = _min_max(x[whole:], self.bits, axis=0)
        return out

    def allocated_bits(self, tokens, heads, dim):
        return heads * dim * (self.bits * tokens + 32 * math.ceil(tokens / self.group))


@dataclass(frozen=True)
class PerToken:
    """Groups of channels within a token share a least value and a step: KIVI's values."""

    bits: int = 2
    group: int = 32

    @property
    def name(self) -> str:
        return f"int{self.bits} per token/g{self.group}"

    def apply(self, x):
        return _min_max(grouped(x, self.group, self.name), self.bits, axis=-1).reshape(x.shape)

    def allocated_bits(self, tokens, heads, dim):
        return tokens * heads * (self.bits * dim + 32 * (dim // self.group))


@dataclass(frozen=True)
class Sorted:
    """int2 in ``groups`` groups of channels of like magnitude, each with its own scale per token.

    The channels are sorted once per head by mean magnitude, the order stored once. With ``per_vector`` every vector
    is sorted by itself, which puts its largest values together and has to store which group each value is in.
    """

    groups: int
    per_vector: bool = False

    @property
    def name(self) -> str:
        return f"int2 in {self.groups} groups sorted by {'vector' if self.per_vector else 'head'}"

    def apply(self, x):
        g_size = x.shape[-1] // self.groups
        grouped(x, g_size, self.name)
        size = np.abs(x)
        order = np.argsort(size if self.per_vector else size.mean(axis=0, keepdims=True), axis=-1, kind="stable")
        order = np.broadcast_to(order, x.shape)
        g = grouped(np.take_along_axis(x, order, axis=-1), g_size, self.name)
        # Four levels, at -1.5, -0.5, 0.5 and 1.5 scales.
        scale = as_f16(np.abs(g).max(axis=-1, keepdims=True) / np.float32(1.5))
        codes = np.divide(g, scale, out=np.zeros_like(g), where=scale > 0)
        back = (np.clip(np.floor(codes), -2, 1) + np.float32(0.5)) * scale
        out = np.empty_like(x)
        np.put_along_axis(out, order, back.reshape(x.shape), axis=-1)
        return out

    def allocated_bits(self, tokens, heads, dim):
        codes = tokens * heads * (2 * dim + 16 * self.groups)
        if self.per_vector:
            return codes + tokens * heads * dim * math.ceil(math.log2(self.groups))
        return codes + heads * dim * math.ceil(math.log2(dim))


@dataclass(frozen=True)
class Ternary:
    """-1, 0 or 1 times a scale for ``group`` values; five of them in a byte. Threshold and scale as in arXiv 1605.04711."""

    group: int = 64
    #: Each level is the mean of what it stands for.
    centroid = True

    @property
    def name(self) -> str:
        return f"ternary/g{self.group}"

    def apply(self, x):
        g = grouped(x, self.group, self.name)
        size = np.abs(g)
        kept = size > np.float32(0.7) * size.mean(axis=-1, keepdims=True)
        scale = as_f16((size * kept).sum(axis=-1, keepdims=True) / np.maximum(kept.sum(axis=-1, keepdims=True), 1))
        return (np.sign(g) * kept * scale).astype(np.float32).reshape(x.shape)

    def allocated_bits(self, tokens, heads, dim):
        return tokens * heads * (dim // self.group) * (8 * math.ceil(self.group / 5) + 16)


@dataclass(frozen=True)
class Sign:
    """The sign alone, times the mean magnitude of ``group`` values."""

    group: int = 64
    centroid = True

    @property
    def name(self) -> str:
        return f"sign/g{self.group}"

    def apply(self, x):
        g = grouped(x, self.group, self.name)
        scale = as_f16(np.abs(g).mean(axis=-1, keepdims=True))
        return np.where(g < 0, -scale, scale).astype(np.float32).reshape(x.shape)

    def allocated_bits(self, tokens, heads, dim):
        return tokens * heads * (dim + 16 * (dim // self.group))


@dataclass(frozen=True)
class Fourier:
    """The discrete Fourier transform of a head: magnitudes against the largest one, phases evenly, at the given bits."""

    magnitude_bits: int
    phase_bits: int

    @property
    def name(self) -> str:
        return f"Fourier, magnitude {self.magnitude_bits} and phase {self.phase_bits} bits"

    def apply(self, x):
        dim = x.shape[-1]
        grouped(x, 2, self.name)
        spectrum = np.fft.rfft(x, axis=-1)
        size = np.abs(spectrum)
        steps = 2**self.magnitude_bits - 1
        scale = as_f16(size.max(axis=-1, keepdims=True).astype(np.float32) / np.float32(steps))
        size = np.rint(np.divide(size, scale, out=np.zeros_like(size), where=scale > 0)).clip(0, steps) * scale
        turns = 2**self.phase_bits / (2 * np.pi)
        phase = np.rint(np.angle(spectrum) * turns) / turns
        # The first and the last are real: their phase is a sign.
        for end in (0, -1):
            phase[..., end] = np.where(spectrum[..., end].real < 0, np.pi, 0.0)
        return np.fft.irfft(size * np.exp(1j * phase), n=dim, axis=-1).astype(np.float32)

    def allocated_bits(self, tokens, heads, dim):
        return tokens * heads * ((dim // 2 + 1) * self.magnitude_bits + (dim // 2 - 1) * self.phase_bits + 2 + 16)


@dataclass(frozen=True)
class Rotated:
    """Another codec in the domain in which llama.cpp stores quantized caches. f16 caches are stored unrotated."""

    inner: Codec
    side: str

    @property
    def name(self) -> str:
        return f"{self.inner.name}, Hadamard"

    def apply(self, x):
        n = rotation_size(x.shape[-1], keys=self.side == "k")
        return hadamard(self.inner.apply(hadamard(x, n)), n)

    def allocated_bits(self, tokens, heads, dim):
        return self.inner.allocated_bits(tokens, heads, dim)
