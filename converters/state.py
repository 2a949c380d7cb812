"""One sequence's KV cache as llama.cpp saves it, ``llama_state_seq_get_data``, as arrays and back, byte for byte.

For a state that fits in memory; ``state_layout`` has the layout, and reads files of any size.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType

from converters.state_bytes import BytesSource, StateError
from converters.state_layout import CELL, IO_MAGIC, KINDS, MAGIC, SideLayout, StreamLayout, read_layout, type_name

__all__ = ["Cache", "Side", "State", "StateError", "Stream", "read", "saved", "write"]


def saved(context) -> bytes:
    """What llama_state_seq_get_data gives of sequence 0 of a ``llama_context``. Raises StateError if that is not all of it."""
    import llama_cpp

    size = llama_cpp.llama_state_seq_get_size(context, 0)
    space = (ctypes.c_uint8 * size)()
    written = llama_cpp.llama_state_seq_get_data(context, space, size, 0)
    if size == 0 or written != size:
        raise StateError(f"the library saved {written} of {size} bytes of the sequence", "Is there enough memory?")
    return bytes(space)


@dataclass(frozen=True)
class Side:
    """K or V of one layer. ``data`` is uint8 [cells, row bytes], or [values, cells, element bytes] if transposed."""

    type_id: int
    data: np.ndarray
    transposed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell."""
        return self.data.shape[0] * self.data.shape[2] if self.transposed else self.data.shape[1]

    def f16(self) -> np.ndarray:
        """float16 [cells, values], a copy. Raises StateError if the type is another."""
        if self.type_id != GGMLQuantizationType.F16:
            raise StateError(
                f"the cache is stored as {type_name(self.type_id)}, not as f16", "Save it from a context with an f16 cache."
            )
        values = np.ascontiguousarray(self.data).view("<f2")
        return np.ascontiguousarray(values[..., 0].T) if self.transposed else values.copy()

    def with_f16(self, values: np.ndarray) -> "Side":
        """The same side with other values, float16 [cells, values]. Raises StateError for another shape or dtype."""
        if values.dtype != np.float16 or values.shape != self.f16().shape:
            raise StateError(
                f"float16 {self.f16().shape} was expected, not {values.dtype} {values.shape}",
                "A codec must not change the shape of what it stores.",
            )
        rows = np.ascontiguousarray(values.T if self.transposed else values, dtype="<f2")
        return replace(self, data=(rows[..., None] if self.transposed else rows).view(np.uint8))


@dataclass(frozen=True)
class Stream:
    """The cells of one stream: positions int32 [cells], sequence ids int32 [cells], K and V of each layer."""

    positions: np.ndarray
    sequences: np.ndarray
    k: tuple[Side, ...]
    v: tuple[Side, ...]
    transposed: bool


@dataclass(frozen=True)
class Cache:
    """One KV cache. ``streams`` has None where a stream holds no cells; ``description`` is None without the header."""

    streams: tuple[Stream | None, ...]
    description: str | None = None

    @property
    def only(self) -> Stream:
        """The stream that holds cells. Raises StateError if none does."""
        for stream in self.streams:
            if stream is not None:
                return stream
        raise StateError("the saved sequence holds no tokens", "Evaluate a prompt before saving.")


@dataclass(frozen=True)
class State:
    """What one sequence left in the model's caches. ``sequence`` is the id that it was saved from."""

    sequence: int
    caches: tuple[Cache, ...]


def read(data: bytes) -> State:
    """A saved sequence. ``write(read(data)) == data``. Raises StateError, which says at which byte and why."""
    source = BytesSource(data)
    layout = read_layout(source)
    if layout.kind != "memory":
        raise StateError(f"the state is a {KINDS[layout.kind]}", "Give what llama_state_seq_get_data writes.")
    return State(layout.sequence, tuple(Cache(tuple(_stream(source, s) for s in cache.streams), cache.description) for cache in layout.caches))


def _stream(source: BytesSource, stream: StreamLayout | None) -> Stream | None:
    if stream is None:
        return None
    cells = np.frombuffer(source.read(stream.cells_at, stream.cells_end - stream.cells_at, "the cells"), CELL)
    k, v = (tuple(_side(source, side) for side in sides) for sides in (stream.k, stream.v))
    return Stream(cells["pos"].copy(), cells["seq"].copy(), k, v, stream.transposed)


def _side(source: BytesSource, side: SideLayout) -> Side:
    data = np.frombuffer(source.read(side.at, side.nbytes, "the values"), np.uint8)
    shape = (side.values, side.cells, side.type.size) if side.transposed else (side.cells, side.row_bytes)
    return Side(side.type.type_id, data.reshape(shape), side.transposed)


def write(state: State) -> bytes:
    """The bytes that ``llama_state_seq_set_data`` takes."""
    parts = [struct.pack("<Ii", IO_MAGIC, state.sequence)]
    for cache in state.caches:
        if cache.description is not None:
            text = cache.description.encode("utf-8")
            parts += [struct.pack("<II", MAGIC, len(text)), text]
        parts.append(struct.pack("<I", len(cache.streams)))
        for stream in cache.streams:
            if stream is None:
                parts.append(struct.pack("<I", 0))
                continue
            n_cells = len(stream.positions)
            cells = np.empty(n_cells, CELL)
            cells["pos"], cells["n_seq"], cells["seq"] = stream.positions, 1, stream.sequences
            parts += [struct.pack("<I", n_cells), cells.tobytes()]
            parts.append(struct.pack("<II", stream.transposed, len(stream.k)))
            for side in (*stream.k, *stream.v):
                if side.transposed:
                    values, _, element = side.data.shape
                    parts.append(struct.pack("<iII", side.type_id, element, values))
                else:
                    parts.append(struct.pack("<iQ", side.type_id, side.data.shape[1]))
                parts.append(side.data.tobytes())
    return b"".join(parts)
