"""One sequence's KV cache as llama.cpp saves it: ``llama_state_seq_get_data``, read and written byte for byte.

The layout, all little-endian (``state_seq_get_data`` and ``llama_kv_cache::state_write`` of the pinned llama.cpp)::

    u32 0xaf143cd8, i32 sequence it was saved from
    cache          one, or two for models with sliding-window layers: the full layers' first
      [u32 "KVP1", u32 n, n bytes]   only if the cache is not one that upstream could have made
      u32 n_stream
      per stream   u32 n_cells; nothing more if it is 0
        per cell   i32 position, u32 1, i32 sequence
        u32 v_trans, u32 n_layer
        per layer  K: i32 type, u64 bytes of a cell's row, rows [n_cells, row]
        per layer  V: the same, or with v_trans: i32 type, u32 bytes of an element, u32 n_values,
                   elements [n_values, n_cells]

v_trans is set when flash attention is off. The layers have no numbers: they come in the order of the
model's layers that own KV in that cache. Cells with more than one position (M-RoPE) and recurrent
states have other layouts and are refused.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.policy import STOCK

#: "KVP1", LLAMA_KV_POLICY_STATE_MAGIC of the patched llama.cpp.
MAGIC = 0x3150564B
#: What begins every sequence's state in memory (llama_context's io_magic).
IO_MAGIC = 0xAF143CD8
#: The patched reader takes no longer description.
MAX_DESCRIPTION = 64 * 1024
CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])


class StateError(KvfmtError):
    """A saved sequence that is damaged, or of another kind than was expected."""


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


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = memoryview(data), 0

    def take(self, n: int, what: str) -> memoryview:
        if n > len(self.data) - self.at:
            raise StateError(
                f"the state ends at byte {len(self.data)}, within {what}: {n} bytes were to follow byte {self.at}",
                "It was cut off, or is not a saved sequence. Save it again.",
            )
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code: str, what: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]


def type_name(type_id: int) -> str:
    """Name of a ggml type, or its number."""
    for fmt in registry.all_formats():
        if fmt.spec.type_id == type_id:
            return fmt.spec.name
    try:
        return GGMLQuantizationType(type_id).name.lower()
    except ValueError:
        return f"type {type_id}"


def _block_bytes() -> dict[int, int]:
    stock = {int(GGMLQuantizationType[n.upper()]): GGML_QUANT_SIZES[GGMLQuantizationType[n.upper()]][1] for n in STOCK}
    return stock | {fmt.spec.type_id: fmt.spec.size for fmt in registry.all_formats()}


def read(data: bytes) -> State:
    """A saved sequence. ``write(read(data)) == data``. Raises StateError, which says at which byte and why."""
    reader = _Reader(data)
    if not data:
        raise StateError("the state is empty", "Save it with llama_state_seq_get_data.")
    magic = reader.number("I", "the magic")
    if magic != IO_MAGIC:
        raise StateError(
            f"the state begins with 0x{magic:08x}, not with 0x{IO_MAGIC:08x}", "It is not what llama_state_seq_get_data writes."
        )
    sequence = reader.number("i", "the sequence")
    caches = []
    while reader.at < len(data):
        if len(caches) == 2:
            raise StateError(
                f"{len(data) - reader.at} bytes follow the second cache, at byte {reader.at}",
                "No model with more than two KV caches is known; recurrent states are not read here.",
            )
        caches.append(_read_cache(reader))
    if not caches:
        raise StateError("the state ends before its first cache", "It was cut off. Save it again.")
    return State(sequence, tuple(caches))


def _read_cache(reader: _Reader) -> Cache:
    start = reader.at
    first, description = reader.number("I", "the number of streams"), None
    if first == MAGIC:
        size = reader.number("I", "the size of the description")
        if size > MAX_DESCRIPTION:
            raise StateError(f"a description of {size} bytes at byte {start}", f"At most {MAX_DESCRIPTION}: the state is damaged.")
        raw = bytes(reader.take(size, "the description"))
        try:
            description = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise StateError(f"the description at byte {start} is not text", "The state is damaged.") from None
        first = reader.number("I", "the number of streams")
    if not 1 <= first <= 256:
        raise StateError(
            f"{first} streams at byte {reader.at - 4}", "1 to 256 are possible: this is not a saved KV cache, or another version's."
        )
    return Cache(tuple(_read_stream(reader) for _ in range(first)), description)


def _read_stream(reader: _Reader) -> Stream | None:
    n_cells = reader.number("I", "the number of cells")
    if n_cells == 0:
        return None
    cells = np.frombuffer(reader.take(n_cells * CELL.itemsize, f"the {n_cells} cells"), CELL)
    if (cells["n_seq"] != 1).any() or (cells["pos"] < 0).any():
        raise StateError(
            f"the cells before byte {reader.at} are not one position and one sequence each",
            "Whole-context states, M-RoPE models and damaged states are not read here.",
        )
    transposed = reader.number("I", "the transposition of V")
    n_layer = reader.number("I", "the number of layers")
    if transposed > 1 or not 1 <= n_layer <= 1024:
        raise StateError(f"v_trans {transposed} and {n_layer} layers at byte {reader.at - 8}", "The state is damaged.")
    sizes = _block_bytes()
    k = tuple(_read_side(reader, n_cells, False, sizes, f"K of layer {i}") for i in range(n_layer))
    # A cache without V (multi-head latent attention) ends here.
    n_v = n_layer if reader.at < len(reader.data) else 0
    v = tuple(_read_side(reader, n_cells, bool(transposed), sizes, f"V of layer {i}") for i in range(n_v))
    return Stream(cells["pos"].copy(), cells["seq"].copy(), k, v, bool(transposed))


def _read_side(reader: _Reader, n_cells: int, transposed: bool, sizes: dict[int, int], what: str) -> Side:
    type_id = reader.number("i", f"the type of {what}")
    if type_id not in sizes:
        raise StateError(f"{what} has type {type_id} at byte {reader.at - 4}", "No cache has it: the state is damaged, or another version's.")
    if transposed:
        element, values = reader.number("I", f"the element size of {what}"), reader.number("I", f"the width of {what}")
        if element != sizes[type_id] or values == 0:
            raise StateError(
                f"{what}: {values} elements of {element} bytes, but {type_name(type_id)} has {sizes[type_id]}", "The state is damaged."
            )
        raw, shape = reader.take(n_cells * element * values, f"the values of {what}"), (values, n_cells, element)
    else:
        row = reader.number("Q", f"the row size of {what}")
        if row == 0 or row % sizes[type_id]:
            raise StateError(
                f"{what}: rows of {row} bytes are not whole blocks of {type_name(type_id)}, {sizes[type_id]} bytes each",
                "The state is damaged.",
            )
        raw, shape = reader.take(n_cells * row, f"the values of {what}"), (n_cells, row)
    return Side(type_id, np.frombuffer(raw, np.uint8).reshape(shape), transposed)


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
