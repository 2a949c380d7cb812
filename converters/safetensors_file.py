"""Reads and writes safetensors files without torch: a length, a JSON header, the bytes. Nothing in a file is trusted."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator

import numpy as np

from kvfmt.build.files import asked_file
from kvfmt.errors import KvfmtError

#: Longest header that is read: a thousandth of it names a thousand tensors.
MAX_HEADER = 100 << 20
#: Float types by their names in the header; bf16 is the upper half of a float32, which numpy does not have.
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class SafetensorsError(KvfmtError):
    """A file that is not a whole safetensors file, or has something else than floats in it."""


@dataclass(frozen=True)
class SafeTensors:
    """An open file: ``shapes`` by name; ``read`` gives the values."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    _places: dict[str, tuple[str, int]]
    _data: np.ndarray

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, float32 (float16 for F16), a copy where the file's type is another. Raises KvfmtError for integers."""
        kind, start = self._places[name]
        if kind not in FLOATS:
            raise SafetensorsError(f"{self.name}: tensor {name} is of type {kind}", "Floats are read: " + ", ".join(FLOATS))
        dtype, shape = np.dtype(FLOATS[kind]), self.shapes[name]
        values = self._data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        if kind == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values if kind == "F16" else values.astype(np.float32)


_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def read_safetensors(path: Path) -> SafeTensors:
    """Opens a file, mapped. Raises SafetensorsError that says what is wrong, for any file whatever."""
    path = Path(path)
    if not path.is_file():
        raise SafetensorsError(f"no file {path}", "Check the name.")

    def wrong(what: str) -> SafetensorsError:
        return SafetensorsError(f"{path.name}: {what}", "It is damaged, or not a safetensors file.")

    size = path.stat().st_size
    if size < 8:
        raise wrong(f"it has {size} bytes, less than the length of a header")
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(size - 8, MAX_HEADER):
        raise wrong(f"its header has {length} bytes, of {size - 8} in the file and {MAX_HEADER} at most")
    try:
        header = json.loads(data[8 : 8 + length].tobytes().decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise wrong(f"its header is no JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise wrong("its header is no list of tensors")
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, int]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        entry = entry if isinstance(entry, dict) else {}
        kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        counts = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and 0 <= n <= size for n in shape)
        if not isinstance(kind, str) or not counts or not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
            raise wrong(f"tensor {name[:80]!r} has no dtype, shape and data_offsets")
        start, stop = offsets
        if kind not in _SIZES or not 0 <= start <= stop <= size - 8 - length or stop - start != math.prod(shape) * _SIZES[kind]:
            raise wrong(f"tensor {name[:80]!r}, {kind} {shape}, cannot be at bytes {start} to {stop} of {size - 8 - length}")
        shapes[name], places[name] = tuple(shape), (kind, 8 + length + start)
    return SafeTensors(path.name, shapes, places, data)


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], values: Iterable[np.ndarray]) -> None:
    """Writes float32 tensors of these shapes, whole or not at all; ``values`` come one by one, in that order.

    Raises KvfmtError if they do not fit the shapes or cannot be written.
    """
    at, header = 0, {}
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    found: Iterator[np.ndarray] = iter(values)
    with asked_file(Path(path), "the dump") as partial, open(partial, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            array = next(found)
            if array.shape != tuple(shape):
                raise KvfmtError(f"tensor {name} is {array.shape}, {tuple(shape)} was announced", "Give the shapes of what is written.")
            out.write(np.ascontiguousarray(array, "<f4").data)
