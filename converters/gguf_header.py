"""What stands before the tensors in a GGUF file, and where it stands: enough to copy a file and change a few bytes.

gguf-py's reader refuses a file with one tensor of a type that it does not know. Here a type matters only for a tensor
whose bytes are asked for. The layout is that of ggml/docs/gguf.md, little-endian, versions 2 and 3::

    "GGUF", u32 version, u64 n_tensors, u64 n_kv
    n_kv times       str key, u32 type, value          str = u64 n, n bytes; array = u32 type, u64 n, n values
    n_tensors times  str name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset from the data's start
    padding to general.alignment, the data
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Union

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from kvfmt.errors import KvfmtError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


class GgufError(KvfmtError):
    """A file that is no GGUF, or is damaged, or of a kind that is not read here."""


@dataclass(frozen=True)
class Tensor:
    """One tensor. ``shape`` is ggml's: the row's length first. ``start`` is where its bytes begin in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int

    @property
    def type_name(self) -> str:
        """"Q4_K", or "type 39" for one that gguf-py does not know."""
        return GGMLQuantizationType(self.type_id).name if self.type_id in set(GGMLQuantizationType) else f"type {self.type_id}"

    @property
    def rows(self) -> int:
        """Rows of ``shape[0]`` values."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. Raises GgufError for a type that gguf-py does not know, or a row that is not whole blocks."""
        if self.type_id not in set(GGMLQuantizationType):
            raise GgufError(f"{self.name} has {self.type_name}, whose size is not known", "A newer kind of file.")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)]
        if self.shape[0] % block:
            raise GgufError(f"{self.name} has rows of {self.shape[0]} values, not whole blocks of {block}", "The file is damaged.")
        return self.shape[0] // block * size


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a file, and the offsets that a copy needs.

    ``metadata`` has numbers, bools and strings as Python's, arrays of numbers as numpy's; an array of strings is left
    out (vocabularies are long). Bytes [24, kv_end) are the metadata, [kv_end, infos_end) the tensors' descriptions;
    the data begins at ``data_start``, a multiple of ``alignment``.
    """

    path: Path
    version: int
    n_kv: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    kv_end: int
    infos_end: int
    data_start: int
    alignment: int
    file_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def setting(self, name: str, default: Any = None) -> Any:
        """The value under the architecture's name, such as "attention.head_count"."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def read(self, tensor: Tensor, stream: BinaryIO) -> np.ndarray:
        """The tensor's bytes out of the open file, uint8 [rows, row_bytes]. Raises GgufError if they are not all there."""
        n = tensor.rows * tensor.row_bytes
        stream.seek(tensor.start)
        data = stream.read(n)
        if len(data) != n:
            raise GgufError(f"{self.path.name} ends within {tensor.name}", "The file is cut off.")
        return np.frombuffer(data, np.uint8).reshape(tensor.rows, tensor.row_bytes).copy()


class _Cursor:
    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.data):
            raise GgufError(f"{self.name} ends at byte {len(self.data)} within its header", "The file is cut off or damaged.")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, form: str) -> int:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind in _SCALARS:
            form = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(form.itemsize), form)[0].item()
        if kind != GGUFValueType.ARRAY:
            raise GgufError(f"{self.name} has a metadata value of type {kind} at byte {self.at}", "The file is damaged.")
        of, n = self.number("I"), self.number("Q")
        if of in _SCALARS:
            form = np.dtype(_SCALARS[of])
            return np.frombuffer(self.take(n * form.itemsize), form)
        for _ in range(n):
            if of == GGUFValueType.STRING:
                self.take(self.number("Q"))
            else:
                self.value(of)
        return None


def read_header(path: Union[Path, str]) -> Header:
    """Reads what stands before the tensors. Raises GgufError for a file that is no whole GGUF header."""
    path = Path(path)
    if not path.is_file():
        raise GgufError(f"no model at {path}", "Give a GGUF file.")
    size = path.stat().st_size
    with open(path, "rb") as stream:
        if stream.read(4) != MAGIC or size < 24:
            raise GgufError(f"{path.name} is not a GGUF file", "Give a model in llama.cpp's format.")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path.name), path, size)


def _parse(cursor: _Cursor, path: Path, size: int) -> Header:
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        raise GgufError(
            f"{path.name} is GGUF version {version if version < 1 << 16 else 'of another byte order'}",
            f"Versions {' and '.join(map(str, VERSIONS))}, little-endian, are read.",
        )
    n_tensors, n_kv = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(n_kv):
        key = cursor.text()
        value = cursor.value(cursor.number("I"))
        if value is not None:
            metadata[key] = value
    kv_end = cursor.at
    found = []
    for _ in range(n_tensors):
        name, n_dims = cursor.text(), cursor.number("I")
        found.append((name, tuple(cursor.number("Q") for _ in range(n_dims)), cursor.number("I"), cursor.number("Q")))
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    if alignment < 1:
        raise GgufError(f"{path.name} has an alignment of {alignment}", "The file is damaged.")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {name: Tensor(name, shape, kind, data_start + offset) for name, shape, kind, offset in found}
    return Header(path, version, n_kv, metadata, tensors, kv_end, cursor.at, data_start, alignment, size)


def string_field(key: str, value: str) -> bytes:
    """A metadata entry as it stands in the file."""
    parts = [key.encode("utf-8"), value.encode("utf-8")]
    return struct.pack("<Q", len(parts[0])) + parts[0] + struct.pack("<IQ", GGUFValueType.STRING, len(parts[1])) + parts[1]
