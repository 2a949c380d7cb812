"""Copies a GGUF file with other metadata: the tensors keep their bytes, their order and their distances."""

from __future__ import annotations

import struct
from typing import BinaryIO, Callable, Collection

from kvfmt.errors import KvfmtError
from kvfmt.gguf_read import ARRAY, STRING, U64, GgufFile

CHUNK = 16 << 20


def string_entry(key: str, value: str) -> bytes:
    """A string among a GGUF's metadata, as it stands in the file."""
    text = value.encode("utf-8")
    return _key(key) + struct.pack("<IQ", STRING, len(text)) + text


def u64_entry(key: str, value: int) -> bytes:
    """A number among a GGUF's metadata, as it stands in the file."""
    return _key(key) + struct.pack("<IQ", U64, value)


def words_entry(key: str, data: bytes) -> bytes:
    """Bytes among a GGUF's metadata as a list of 64-bit words, filled up with zeros, as it stands in the file."""
    padded = data + bytes(-len(data) % 8)
    return _key(key) + struct.pack("<IIQ", ARRAY, U64, len(padded) // 8) + padded


def _key(key: str) -> bytes:
    name = key.encode("utf-8")
    return struct.pack("<Q", len(name)) + name


def write_header(file: GgufFile, out: BinaryIO, added: list[bytes], without: Collection[str] = ()) -> None:
    """Everything before the tensors' bytes: the file's metadata except the keys ``without``, then the entries ``added``."""
    kept = [span for key, span in file.spans.items() if key not in without]
    # magic, version and the number of tensors; the number of values; the values; the tensors.
    out.write(file.data[:16])
    out.write(struct.pack("<Q", len(kept) + len(added)))
    for start, stop in kept:
        out.write(file.data[start:stop])
    out.write(b"".join(added))
    out.write(file.data[file.values_end : file.infos_end])
    out.write(bytes(-out.tell() % file.alignment))


def check_padding(file: GgufFile) -> None:
    """Raises KvfmtError if what stands before the tensors' bytes is not zeros: a copy would not have it."""
    if any(file.data[file.infos_end : file.data_start]):
        raise KvfmtError(
            f"{file.name} has {file.data_start - file.infos_end} bytes of its own between its header and its tensors",
            "Zeros were expected there: it was not written by llama.cpp or gguf-py, and could not be restored byte for byte.",
        )


def copy_tensors(file: GgufFile, out: BinaryIO, update: Callable[[int, int], None] = lambda done, of: None) -> None:
    """Everything from the tensors' bytes on. ``update(bytes, of)`` is called on the way."""
    for at in range(file.data_start, len(file.data), CHUNK):
        end = min(at + CHUNK, len(file.data))
        out.write(file.data[at:end])
        update(end, len(file.data))
