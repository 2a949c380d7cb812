"""Where everything lies in a state that llama.cpp saved, found without reading the cache itself.

The layouts, all little-endian (``llama-context.cpp`` and ``llama-kv-cache.cpp`` of the pinned llama.cpp)::

    session file       u32 "ggsn", u32 10, u32 n_tokens, i32 [n_tokens], then a context state
                       (llama_state_save_file, --prompt-cache, Llama.save_state has the context state alone)
    sequence file      u32 "ggsq", u32 3, u32 n_tokens, i32 [n_tokens], caches
                       (llama_state_seq_save_file; a server's slot: its tokens are packed with what is between them)
    sequence state     u32 0xaf143cd8, i32 sequence it was saved from, caches
                       (llama_state_seq_get_data)
    context state      u32 length, name of the architecture, caches
                       (llama_state_get_data)

    cache              one, or two for models with sliding-window layers: the full layers' first
      [u32 "KVP1", u32 n, n bytes]   only if the cache is not one that upstream could have made
      u32 n_stream
      per stream   u32 n_cells; nothing more if it is 0
        per cell   i32 position, u32 n_seq, i32 [n_seq] sequences; n_seq is 1 unless all sequences were saved
        u32 v_trans, u32 n_layer
        per layer  K: i32 type, u64 bytes of a cell's row, rows [n_cells, row]
        per layer  V: the same, or with v_trans: i32 type, u32 bytes of an element, u32 n_values,
                   elements [n_values, n_cells]

v_trans is set when flash attention is off. The layers have no numbers: they come in the order of the
model's layers that own KV in that cache. Cells with more than one position (M-RoPE) and recurrent
states have other layouts and are refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from gguf import GGMLQuantizationType

from converters.state_bytes import Source, StateError
from kvfmt.policy import CacheType, cache_type, known_types

#: "KVP1", LLAMA_KV_POLICY_STATE_MAGIC of the patched llama.cpp.
MAGIC = 0x3150564B
#: What begins every sequence's state in memory (llama_context's io_magic).
IO_MAGIC = 0xAF143CD8
#: LLAMA_SESSION_MAGIC and _VERSION, LLAMA_STATE_SEQ_MAGIC and _VERSION of llama.h.
SESSION, SESSION_VERSION = 0x6767736E, 10
SEQUENCE, SEQUENCE_VERSION = 0x67677371, 3
GGUF = 0x46554747
#: The patched reader takes no longer description.
MAX_DESCRIPTION = 64 * 1024
#: LLAMA_MAX_SEQ: streams of a cache, sequences of a cell.
MAX_SEQUENCES = 256
MAX_LAYERS = 1024
#: Longest name of an architecture that is believed.
MAX_NAME = 64
CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])
#: Cells that are looked at at a time.
CELLS = 1 << 16

KINDS = {"session": "session file", "sequence": "sequence file", "memory": "sequence state", "context": "context state"}


@dataclass(frozen=True)
class SideLayout:
    """K or V of one layer: ``values`` a cell, ``at`` the first byte of the data, that of ``cells`` cells."""

    type: CacheType
    values: int
    cells: int
    at: int
    transposed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell."""
        return self.type.row_bytes(self.values)

    @property
    def nbytes(self) -> int:
        return self.cells * self.row_bytes

    @property
    def header_bytes(self) -> int:
        """Type and size before the data: 12 bytes either way."""
        return 12


@dataclass(frozen=True)
class StreamLayout:
    """One stream: its cells' records are bytes [``cells_at``, ``cells_end``). ``v`` is empty if V is a view of K."""

    cells: int
    cells_at: int
    cells_end: int
    transposed: bool
    k: tuple[SideLayout, ...]
    v: tuple[SideLayout, ...]
    first_position: int
    last_position: int

    @property
    def sides(self) -> tuple[SideLayout, ...]:
        return self.k + self.v


@dataclass(frozen=True)
class CacheLayout:
    """One KV cache. ``streams`` has None where a stream holds no cells; ``description`` is None without the header."""

    description: str | None
    streams: tuple[StreamLayout | None, ...]

    @property
    def filled(self) -> tuple[StreamLayout, ...]:
        """The streams that hold cells. Their layers are alike."""
        return tuple(stream for stream in self.streams if stream is not None)


@dataclass(frozen=True)
class StateLayout:
    """A whole saved state. ``kind`` is one of KINDS; what a kind does not have is None."""

    kind: str
    size: int
    caches_at: int
    caches: tuple[CacheLayout, ...]
    version: int | None = None
    tokens: int | None = None
    sequence: int | None = None
    architecture: str | None = None

    @property
    def sides(self) -> tuple[SideLayout, ...]:
        return tuple(side for cache in self.caches for stream in cache.filled for side in stream.sides)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V alone."""
        return sum(side.nbytes for side in self.sides)

    @property
    def values(self) -> int:
        return sum(side.values * side.cells for side in self.sides)


@lru_cache(maxsize=1)
def types_by_id() -> dict[int, CacheType]:
    """Every type that a cache can have."""
    return {kind.type_id: kind for kind in map(cache_type, known_types())}


def type_name(type_id: int) -> str:
    """Name of a ggml type, or its number."""
    if type_id in types_by_id():
        return types_by_id()[type_id].name
    try:
        return GGMLQuantizationType(type_id).name.lower()
    except ValueError:
        return f"type {type_id}"


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0

    @property
    def left(self) -> int:
        return self.source.size - self.at

    def take(self, n: int, what: str) -> bytes | memoryview:
        data = self.source.read(self.at, n, what)
        self.at += n
        return data

    def skip(self, n: int, what: str) -> int:
        """Steps over ``n`` bytes, which must be there; returns where they begin."""
        if n > self.left:
            self.source.read(self.at, n, what)  # raises
        self.at += n
        return self.at - n

    def number(self, code: str, what: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, n: int, what: str) -> str:
        at = self.at
        try:
            return str(self.take(n, what), "utf-8")
        except UnicodeDecodeError:
            raise StateError(f"{what} at byte {at} is not text", "The state is damaged.") from None


def read_layout(source: Source) -> StateLayout:
    """The layout of a saved state of any kind; every count and size in it was held against the bytes that there are.

    Reads the headers and the cells' records, never K and V. Raises StateError, which says at which byte and why.
    """
    reader = _Reader(source)
    if not source.size:
        raise StateError(f"{source.name} is empty", "Save it again.")
    magic = reader.number("I", "the magic")
    if magic in (SESSION, SEQUENCE):
        kind, known = ("session", SESSION_VERSION) if magic == SESSION else ("sequence", SEQUENCE_VERSION)
        version = reader.number("I", "the version")
        if version != known:
            raise StateError(
                f"a {KINDS[kind]} of version {version}; version {known} is known",
                "It was saved by a newer llama.cpp: this kvfmt does not know its layout." if version > known else "It was saved by an older llama.cpp. Evaluate the prompt again.",
            )
        tokens = reader.number("I", "the number of tokens")
        reader.skip(4 * tokens, f"the {tokens} tokens")
        architecture = _architecture(reader) if kind == "session" else None
        return _caches(reader, kind, version=version, tokens=tokens, architecture=architecture)
    if magic == IO_MAGIC:
        return _caches(reader, "memory", sequence=reader.number("i", "the sequence"))
    if magic <= MAX_NAME:
        reader.at = 0
        return _caches(reader, "context", architecture=_architecture(reader))
    raise StateError(
        f"{source.name} begins with 0x{magic:08x}, not as a saved state does",
        "It is a GGUF file: a model, or a profile (kvfmt profile show)." if magic == GGUF
        else "Give what llama.cpp saved: a session, a slot, or a state out of memory.",
    )


def _architecture(reader: _Reader) -> str:
    at, size = reader.at, reader.number("I", "the length of the architecture's name")
    if not 1 <= size <= MAX_NAME:
        raise StateError(f"an architecture's name of {size} bytes at byte {at}", "It is no saved context, or is damaged.")
    name = reader.text(size, "the architecture's name")
    if not (name.isascii() and name.isprintable()):
        raise StateError(f"{name!r} at byte {at} is not the name of an architecture", "It is no saved context, or is damaged.")
    return name


def _caches(reader: _Reader, kind: str, **facts) -> StateLayout:
    at, caches = reader.at, []
    refuse_architecture(facts.get("architecture"))
    while reader.left:
        if len(caches) == 2:
            raise StateError(
                f"{reader.left} bytes follow the second cache, at byte {reader.at}",
                "No model with more than two KV caches is known; recurrent states are not read here.",
            )
        caches.append(_cache(reader, several=kind in ("session", "context")))
    if not caches:
        raise StateError("the state ends before its first cache", "It was cut off. Save it again.")
    return StateLayout(kind, reader.source.size, at, tuple(caches), **facts)


#: Architectures whose memory is not one KV cache or two, by what it is. From llm_arch_is_recurrent, llm_arch_is_hybrid and
#: llama_model::create_memory of the pinned llama.cpp, which a test reads.
OTHER_MEMORY = {
    "recurrent layers": ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    "attention and recurrent layers": (
        "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen3next",
        "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "minimax-01",
    ),
    "caches for an indexer": ("minimax-m3", "glm-dsa", "deepseek32", "hy_v4", "dots3note"),
}


def refuse_architecture(name: str | None) -> None:
    """Raises StateError for a model whose state is not read here."""
    for what, names in OTHER_MEMORY.items():
        if name in names:
            raise StateError(f"architecture {name} has {what}: its states have another layout", "Only models with plain KV caches are read.")


def _cache(reader: _Reader, several: bool) -> CacheLayout:
    start = reader.at
    first, description = reader.number("I", "the number of streams"), None
    if first == MAGIC:
        size = reader.number("I", "the size of the description")
        if size > MAX_DESCRIPTION:
            raise StateError(f"a description of {size} bytes at byte {start}", f"At most {MAX_DESCRIPTION}: the state is damaged.")
        description = reader.text(size, "the description")
        first = reader.number("I", "the number of streams")
    if not 1 <= first <= MAX_SEQUENCES:
        raise StateError(
            f"{first} streams at byte {reader.at - 4}",
            f"1 to {MAX_SEQUENCES} are possible: this is not a saved KV cache, or another version's. Recurrent states are not read here.",
        )
    cache = CacheLayout(description, tuple(_stream(reader, several) for _ in range(first)))
    shapes = {tuple((side.type.name, side.values) for side in stream.sides) for stream in cache.filled}
    if len(shapes) > 1:
        raise StateError(f"the streams of the cache at byte {start} have different layers", "The state is damaged.")
    return cache


def _stream(reader: _Reader, several: bool) -> StreamLayout | None:
    n_cells = reader.number("I", "the number of cells")
    if n_cells == 0:
        return None
    cells_at = reader.at
    first, last = _cells(reader, n_cells, several)
    cells_end = reader.at
    transposed = reader.number("I", "the transposition of V")
    n_layer = reader.number("I", "the number of layers")
    if transposed > 1 or not 1 <= n_layer <= MAX_LAYERS:
        raise StateError(f"v_trans {transposed} and {n_layer} layers at byte {reader.at - 8}", "The state is damaged, or of a model with several positions a token.")
    k = tuple(_side(reader, n_cells, False, f"K of layer {i}") for i in range(n_layer))
    # A cache without V (multi-head latent attention) ends here.
    n_v = n_layer if reader.left else 0
    v = tuple(_side(reader, n_cells, bool(transposed), f"V of layer {i}") for i in range(n_v))
    return StreamLayout(n_cells, cells_at, cells_end, bool(transposed), k, v, first, last)


def _cells(reader: _Reader, n_cells: int, several: bool) -> tuple[int, int]:
    """Steps over the cells' records; their least and largest position."""
    if n_cells > reader.left // CELL.itemsize and not several:
        reader.skip(n_cells * CELL.itemsize, f"the {n_cells} cells")  # raises
    # With several sequences a cell has at least its position and a count.
    if n_cells > reader.left // 8:
        reader.skip(n_cells * 8, f"the {n_cells} cells")
    first, last, done, window = 2**31, -1, 0, CELLS
    while done < n_cells:
        n = min(n_cells - done, window, max(reader.left // CELL.itemsize, 1))
        window = min(8 * window, CELLS)
        at = reader.at
        cells = np.frombuffer(reader.take(n * CELL.itemsize, f"the {n_cells} cells"), CELL)
        # As many as are of one sequence each are stepped over at once.
        usual = cells["n_seq"] == 1
        if several and not usual.all():
            n, window = int(np.argmin(usual)), 64
            cells = cells[:n]
            reader.at = at + n * CELL.itemsize
            if n == 0:
                position, count = struct.unpack("<iI", reader.take(8, f"the {n_cells} cells"))
                if not 1 <= count <= MAX_SEQUENCES or position < 0:
                    _refuse_cells(reader.at)
                sequences = np.frombuffer(reader.take(4 * count, f"the {n_cells} cells"), "<i4")
                if (sequences < 0).any() or (sequences >= MAX_SEQUENCES).any():
                    _refuse_cells(reader.at)
                first, last, done = min(first, position), max(last, position), done + 1
                continue
        if not (cells["n_seq"] == 1).all() or (cells["pos"] < 0).any() or (several and ((cells["seq"] < 0) | (cells["seq"] >= MAX_SEQUENCES)).any()):
            _refuse_cells(reader.at)
        first, last, done = min(first, int(cells["pos"].min())), max(last, int(cells["pos"].max())), done + n
    return first, last


def _refuse_cells(at: int) -> None:
    raise StateError(
        f"the cells before byte {at} are not one position each and its sequences",
        "M-RoPE models, recurrent states and damaged states are not read here.",
    )


def _side(reader: _Reader, n_cells: int, transposed: bool, what: str) -> SideLayout:
    type_id = reader.number("i", f"the type of {what}")
    kind = types_by_id().get(type_id)
    if kind is None:
        raise StateError(f"{what} has {type_name(type_id)} at byte {reader.at - 4}", "No cache has it: the state is damaged, or another version's.")
    if transposed:
        element, values = reader.number("I", f"the element size of {what}"), reader.number("I", f"the width of {what}")
        if element != kind.size or values == 0 or kind.is_quantized:
            raise StateError(
                f"{what}: {values} elements of {element} bytes, transposed; {kind.name} has {kind.size} bytes for {kind.block}", "The state is damaged."
            )
    else:
        row = reader.number("Q", f"the row size of {what}")
        if row == 0 or row % kind.size:
            raise StateError(
                f"{what}: rows of {row} bytes are not whole blocks of {kind.name}, {kind.size} bytes each",
                "The state is damaged, or a layer has no KV heads.",
            )
        values = row // kind.size * kind.block
    side = SideLayout(kind, values, n_cells, reader.at, transposed)
    reader.skip(side.nbytes, f"the values of {what}")
    return side
