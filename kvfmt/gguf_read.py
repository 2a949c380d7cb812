"""Reads GGUF files without trusting them: every length is held against the bytes that are left.

gguf-py's reader walks past the end of a damaged file, and lays out as many array elements as a damaged length says.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvfmt.errors import KvfmtError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
#: Longest key and tensor name, in bytes; ggml has 64 for a tensor.
MAX_NAME = 65535

#: Values that a tensor can have at most; beyond it numpy counts no bytes.
MOST_VALUES = 1 << 58

#: GGUF's value types: struct code by number.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, STRING, ARRAY, U64 = 4, 8, 9, 10
FLOATS = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2", GGMLQuantizationType.F64: "<f8"}
INTEGERS = {GGMLQuantizationType.I32: "<i4"}


class GgufError(KvfmtError):
    """A file that is not a whole GGUF file, or has something that was not expected in it."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. ``shape`` is numpy's: ggml's ne0 is the last; ``offset`` is counted in the file, in bytes."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    data: memoryview

    @property
    def type_name(self) -> str:
        """"q4_k", or "number 39" for one that gguf-py does not know."""
        return _type_name(self.type_id)

    @property
    def dtype(self) -> np.dtype | None:
        """The float type of the values; None for quantized and integer tensors."""
        return np.dtype(FLOATS[self.type_id]) if self.type_id in FLOATS else None

    def _check_end(self, size: int) -> None:
        if self.offset + size > len(self.data):
            raise GgufError(f"tensor {self.name} ends at byte {self.offset + size}, the file at {len(self.data)}", "It was cut off, or is damaged.")

    def extent(self) -> tuple[int, int]:
        """How many rows of ne0 values, and the bytes of one. Raises GgufError for an unknown type and for a cut file."""
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)]
        except (KeyError, ValueError):
            raise GgufError(f"tensor {self.name} has type {self.type_name}, whose size is not known", "It may be of a newer kind.") from None
        if self.shape[-1] % block:
            raise GgufError(f"tensor {self.name} has rows of {self.shape[-1]} values, not whole blocks of {block}", "The file is damaged.")
        shape = (math.prod(self.shape[:-1]), self.shape[-1] // block * size)
        self._check_end(math.prod(shape))
        return shape

    def rows(self) -> np.ndarray:
        """The bytes of each row, uint8 [rows, bytes], a copy. Raises as ``extent``."""
        shape = self.extent()
        return np.frombuffer(self.data, np.uint8, math.prod(shape), self.offset).reshape(shape).copy()

    def floats(self) -> np.ndarray:
        """The values in the tensor's own float type, read-only, of that shape. Raises GgufError for other types and for a cut file."""
        if self.dtype is None:
            raise GgufError(f"tensor {self.name} has type {self.type_name}, not f16, f32 or f64", "This file was not made by kvfmt.")
        return self._values(self.dtype)

    def integers(self) -> np.ndarray:
        """The values of an i32 tensor, read-only, of its shape. Raises GgufError for other types and for a cut file."""
        if self.type_id not in INTEGERS:
            raise GgufError(f"tensor {self.name} has type {self.type_name}, not i32", "This file was not made by kvfmt.")
        return self._values(np.dtype(INTEGERS[self.type_id]))

    def _values(self, dtype: np.dtype) -> np.ndarray:
        size = math.prod(self.shape) * dtype.itemsize
        self._check_end(size)
        if size == 0:
            return np.empty(self.shape, dtype)
        return np.frombuffer(self.data, dtype, math.prod(self.shape), self.offset).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """``metadata`` by key: int, float, bool, str, a list of str or an array of numbers. ``types``: GGUF's number of each value's
    type, of an array (9, type of its elements).

    For a copy with other metadata: bytes [24, ``values_end``) are the metadata, each value with its key at ``spans`` [from, to) of them,
    [``values_end``, ``infos_end``) say what tensors there are, the tensors' bytes begin at ``data_start``, a multiple of
    ``alignment``. ``data`` is the whole file, mapped."""

    name: str
    metadata: dict[str, Any]
    types: dict[str, int | tuple[int, int]]
    spans: dict[str, tuple[int, int]]
    tensors: dict[str, Tensor]
    values_end: int
    infos_end: int
    data_start: int
    alignment: int
    data: memoryview

    @property
    def architecture(self) -> str:
        """"llama", "kvfmt-profile" ...; empty if the file does not say."""
        found = self.metadata.get("general.architecture", "")
        return found if isinstance(found, str) else ""

    def check_tensors(self) -> None:
        """Raises GgufError if a tensor does not end within the file. Those of a type that gguf-py does not know are left out."""
        for tensor in self.tensors.values():
            if tensor.type_id in GGML_QUANT_SIZES:
                try:
                    tensor.extent()
                except GgufError as error:
                    raise GgufError(f"{self.name}: {error.message}", error.hint) from None

    def setting(self, name: str, default: Any = None) -> Any:
        """What the file has under its architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, n: int, what: str) -> memoryview:
        if n > len(self.data) - self.at:
            raise GgufError(f"the file ends at byte {len(self.data)}, within {what}: {n} bytes were to follow byte {self.at}", "It was cut off, or is damaged.")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, each: int, what: str) -> int:
        """A number of things of at least ``each`` bytes that are to follow."""
        n = self.number("Q", what)
        if n * each > len(self.data) - self.at:
            raise GgufError(f"{n} {what} at byte {self.at - 8} cannot be in the {len(self.data) - self.at} bytes left", "The file was cut off, or is damaged.")
        return n

    def text(self, what: str, limit: int | None = None) -> str:
        size = self.count(1, what)
        if limit is not None and size > limit:
            raise GgufError(f"{what} at byte {self.at} has {size} bytes, more than {limit}", "The file is damaged.")
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{what} at byte {self.at - size} is not text", "The file is damaged.") from None

    def skip_text(self, what: str) -> None:
        self.take(self.number("Q", what), what)


def read_gguf(path: Path, wanted: Callable[[str], bool] = lambda key: True) -> GgufFile:
    """The file's metadata and the places of its tensors; values are read when asked for. The file is mapped, not copied.

    Values of keys that are not ``wanted`` are stepped over. Raises GgufError for anything that is not a whole header.
    """
    path = Path(path)
    if not path.is_file():
        raise GgufError(f"no file {path}", "Check the name.")
    if path.stat().st_size == 0:
        raise GgufError(f"{path.name} is empty", "Make it again.")
    try:
        data = memoryview(np.memmap(path, np.uint8, "r"))
    except (OSError, ValueError) as error:
        raise GgufError(f"{path.name} cannot be read: {error}", "Check the file and its rights.") from None
    return parse_gguf(path.name, data, wanted)


def parse_gguf(name: str, data: memoryview, wanted: Callable[[str], bool] = lambda key: True) -> GgufFile:
    """As ``read_gguf``, of bytes in memory; ``name`` is what errors call them."""
    try:
        return _read(name, data, wanted)
    except GgufError as error:
        raise GgufError(f"{name}: {error.message}", error.hint) from None


def _read(name: str, data: memoryview, wanted: Callable[[str], bool]) -> GgufFile:
    reader = _Reader(data)
    if bytes(reader.take(4, "the magic")) != MAGIC:
        raise GgufError("not a GGUF file", "Give a file in llama.cpp's format.")
    version = reader.number("I", "the version")
    if version not in VERSIONS:
        raise GgufError(f"GGUF version {version}", f"Versions {VERSIONS[0]} and {VERSIONS[1]} are read, little-endian.")
    # A tensor has at least a name's length, dimensions, type and offset; a value at least a key's length, a type and a byte.
    n_tensors = reader.count(24, "tensors")
    n_values = reader.count(13, "metadata values")
    metadata: dict[str, Any] = {}
    types: dict[str, int | tuple[int, int]] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(n_values):
        start = reader.at
        key = reader.text("a key", MAX_NAME)
        if key in types:
            raise GgufError(f"the key {key!r} comes twice", "The file is damaged.")
        types[key], value = _value(reader, key, wanted(key))
        spans[key] = (start, reader.at)
        if value is not None:
            metadata[key] = value
    values_end = reader.at
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise GgufError(f"general.alignment is {alignment}", "A power of two of at least 8 was expected: the file is damaged.")
    places = []
    for _ in range(n_tensors):
        title = reader.text("a tensor's name", MAX_NAME)
        n_dims = reader.number("I", f"the dimensions of {title}")
        if not 1 <= n_dims <= 4:
            raise GgufError(f"tensor {title} has {n_dims} dimensions", "1 to 4 are possible: the file is damaged.")
        shape = tuple(reader.number("Q", f"the shape of {title}") for _ in range(n_dims))[::-1]
        # Of extents alone: with a 0 among them the others promise no bytes, and could be any number.
        if math.prod(max(extent, 1) for extent in shape) > MOST_VALUES:
            raise GgufError(f"tensor {title[:80]!r} has the shape {shape}", "No file holds so much: it is damaged.")
        places.append((title, reader.number("I", f"the type of {title}"), shape, reader.number("Q", f"the offset of {title}")))
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for title, type_id, shape, offset in places:
        if title in tensors:
            raise GgufError(f"the tensor {title} comes twice", "The file is damaged.")
        if offset % alignment or start + offset > len(data):
            raise GgufError(f"tensor {title} is at byte {start + offset} of {len(data)}", "The file was cut off, or is damaged.")
        tensors[title] = Tensor(title, type_id, shape, start + offset, data)
    return GgufFile(name, metadata, types, spans, tensors, values_end, reader.at, start, alignment, data)


def _value(reader: _Reader, key: str, wanted: bool) -> tuple[int | tuple[int, int], Any]:
    kind = reader.number("I", f"the type of {key}")
    if kind == STRING:
        if wanted:
            return kind, reader.text(key)
        reader.skip_text(key)
        return kind, None
    if kind in SCALARS:
        return kind, reader.number(SCALARS[kind], key)
    if kind != ARRAY:
        raise GgufError(f"{key} has type {kind} at byte {reader.at - 4}", "No GGUF value has it: the file is damaged.")
    element = reader.number("I", f"the type of {key}'s elements")
    if element == STRING:
        n = reader.count(8, f"elements of {key}")
        if wanted:
            return (kind, element), [reader.text(key) for _ in range(n)]
        for _ in range(n):
            reader.skip_text(key)
        return (kind, element), None
    if element not in SCALARS:
        raise GgufError(f"{key} is a list of type {element} at byte {reader.at - 4}", "No GGUF list has it: the file is damaged.")
    dtype = np.dtype("<" + SCALARS[element])
    raw = reader.take(reader.count(dtype.itemsize, f"elements of {key}") * dtype.itemsize, key)
    return (kind, element), np.frombuffer(raw, dtype).copy() if wanted else None


def _type_name(type_id: int) -> str:
    try:
        return GGMLQuantizationType(type_id).name.lower()
    except ValueError:
        return f"number {type_id}"
